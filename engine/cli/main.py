"""``penstock COMMAND``: finds the command, runs it, and turns what went wrong into one line and an exit code."""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence

import penstock
from penstock.cli.options import Parser
from penstock.cli.output import say_error
from penstock.errors import ConfigError, InputError, PenstockError, StateError, UsageError

# One module per command, named for it, with add(subparsers) and run(args) -> exit code.
COMMANDS = ("demo", "replay", "validate", "inspect")

OK, FAILED, USAGE, INPUT, CONFIG, STATE, RESOURCE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130

EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (UsageError, USAGE),
    (InputError, INPUT),
    (ConfigError, CONFIG),
    (StateError, STATE),
    (PenstockError, FAILED),
    (MemoryError, RESOURCE),
    (OSError, RESOURCE),
)

DESCRIPTION = "A streaming update engine for embedding tables: Arrow gradients in, TPU-embedding updates out."
EPILOG = """exit codes:
  0 done   1 a difference found or a check failed   2 usage   3 bad input   4 bad configuration
  5 corrupt or incompatible state   6 cannot write, or out of a resource   130 interrupted

example:
  penstock synth log.arrows --rows 100000 && penstock replay log.pbtxt log.arrows --out tables
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    args = parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        say_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return RESOURCE
    except Exception as error:
        code = exit_code(error)
        if os.environ.get("PENSTOCK_TRACEBACK"):
            traceback.print_exc()
        say_error(explain(error))
        if args.json:
            print(json.dumps({"error": explain(error), "exit_code": code}))
        return code


def exit_code(error: Exception) -> int:
    """The code of an error; one that is nobody's fault but ours is raised again, with its traceback."""
    if _out_of_device_memory(error):
        return RESOURCE
    for kind, code in EXIT_CODES:
        if isinstance(error, kind):
            return code
    raise error


def explain(error: Exception) -> str:
    """The error in one line."""
    if isinstance(error, OSError) and not isinstance(error, PenstockError):
        return f"{error.filename or 'writing'}: {os.strerror(error.errno) if error.errno else error}" + (
            "; free some space" if error.errno == errno.ENOSPC else ""
        )
    if isinstance(error, MemoryError) or _out_of_device_memory(error):
        return f"out of memory: {error or 'the tables and one frame must fit'}"
    return str(error)


def _out_of_device_memory(error: Exception) -> bool:
    return type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError") and "RESOURCE_EXHAUSTED" in str(error)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = Parser(
        "penstock", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"penstock.cli.{name}").add(commands)
    return top
