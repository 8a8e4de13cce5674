"""The command line in a forked child: the end of the process, whatever happens."""

import contextlib
import os
import sys
import traceback

from penstock.cli.main import main

TRACEBACK = 99  # an exit code of no command


def become_command(words, out, err):
    """Run a command with these descriptors as its output, and end this process."""
    code = TRACEBACK
    os.dup2(out, 1)
    os.dup2(err, 2)
    try:
        code = main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
