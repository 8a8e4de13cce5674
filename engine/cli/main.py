"""``penstock COMMAND``: the entry point, which runs a command and converts errors to one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import penstock
import penstock.base.integrations as integrations
import penstock.base.interrupts as interrupts
from penstock.base.errors import (
    CapacityError,
    ConfigError,
    InputError,
    ListenError,
    PeerError,
    PenstockError,
    StateError,
    TargetError,
    TruncatedInputError,
    UsageError,
    short,
    without_credentials,
)
from penstock.cli.command_line import COMMANDS, Parser, add_command, parse
from penstock.cli.compile_cache import keep_compiled
from penstock.cli.output import Output, drop_dead_streams, own_process, say_error

# Commands print what the package logs: without a handler, warnings would be on standard error twice.
NO_LOG = logging.NullHandler()


class _Retries(logging.Handler):
    """Reports what a command without a log retries: it would be silent for as long as its patience."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "penstock", {}).get("event") == "retrying":
            say_error(record.getMessage())


RETRIES = _Retries()

# Commands that SIGTERM ends in order: service managers stop them by it.
ENDS_BY_SIGTERM = ("serve", "follow")

OK, FAILED, USAGE, INPUT, CONFIG, STATE, RESOURCE = 0, 1, 2, 3, 4, 5, 6

EXIT_CODES: tuple[tuple[type[PenstockError], int], ...] = (
    (UsageError, USAGE),
    (InputError, INPUT),
    (ConfigError, CONFIG),
    (StateError, STATE),
    (PeerError, RESOURCE),
    (TargetError, RESOURCE),
    (ListenError, RESOURCE),
    (CapacityError, RESOURCE),
    (PenstockError, FAILED),
)

_MUST_FIT = (
    "the tables with their slots, what the gate holds and one frame must fit; give smaller frames "
    "(--contribution-rows) or more memory"
)

# Ctrl-C goes to every process of a pipeline: the end of the input can arrive so many seconds before the signal.
SIGNAL_S = 0.1

# The modules of the libraries that every installation has.
LIBRARIES = ("google", "jax", "jaxlib", "numpy", "pyarrow")

DESCRIPTION = "A streaming update engine for embedding tables: Arrow gradients in, TPU-embedding updates out."
EPILOG = """exit codes:
  0 done   1 a difference found or a check failed   2 usage   3 bad input   4 bad configuration
  5 corrupt or incompatible state   6 cannot write, out of a resource, or lost a process of the job
  130 interrupted; SIGTERM ends serve and follow with 0

PENSTOCK_TRACEBACK=1 in the environment also shows where in the program an error came from,
PENSTOCK_COMPILE_CACHE=DIR sets where compiled programs are kept (off: nowhere).

example:
  penstock demo && penstock replay penstock-demo/tables.pbtxt penstock-demo/log.arrows --num-required 3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. argv : None if the process exists only for this command"""
    logging.getLogger("penstock").addHandler(NO_LOG)
    interrupts.install(own_process=argv is None)
    if argv is not None:
        try:
            return answer(list(argv), threading.Event())
        finally:
            interrupts.remove()
    at_once = threading.Event()
    own_process()
    keep_compiled()
    code = answer(sys.argv[1:], at_once)
    interrupts.ignore()
    if at_once.is_set():
        os._exit(code)
    return code


def answer(argv: list[str], at_once: threading.Event) -> int:
    """Run one command, report its error if it fails, and return the exit code.

    at_once : set to request an exit that waits for no thread: gRPC would wait forever for callers that stay connected
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # penstock reports errors in one line
    as_json = "--json" in argv
    with contextlib.ExitStack() as ending:
        ending.callback(drop_dead_streams)
        try:
            return run(argv, at_once, ending)
        except KeyboardInterrupt as stop:
            return fail(str(stop) or "interrupted", interrupts.INTERRUPTED, as_json)
        except Exception as error:
            if isinstance(error, BrokenPipeError) and error.filename in (None, "<stdout>"):
                return RESOURCE  # the reader of stdout has closed it, so there is nothing to print to
            code, message = judged(error)
            if os.environ.get("PENSTOCK_TRACEBACK"):
                traceback.print_exc()
            return fail(message, code, as_json)


def run(argv: list[str], at_once: threading.Event, ending: contextlib.ExitStack) -> int:
    """Run the command and return its exit code. Errors propagate as exceptions.

    ending : takes the context of the command's log, which is also written while an error is reported
    """
    try:
        args = parse(parser(argv), argv)
    except SystemExit as done:  # --help and --version
        code: int = done.code if isinstance(done.code, int) else OK
    else:
        args.leave_at_once = at_once.set
        out = Output(args.json, aside=getattr(args, "deltas", None) == "-")
        if hasattr(args, "log_level"):
            from penstock.cli.log_lines import logged

            ending.enter_context(logged(args))
        else:
            log = logging.getLogger("penstock")
            log.addHandler(RETRIES)
            ending.callback(log.removeHandler, RETRIES)
        try:
            interrupts.check()
            code = args.run(args, out) or OK
        except TruncatedInputError:
            interrupts.pause(SIGNAL_S)
            raise
        except KeyboardInterrupt:
            if not interrupts.is_terminated() or args.command not in ENDS_BY_SIGTERM:
                raise
            out.say("ended by SIGTERM before it had started")
            out.result({})
            code = OK
    sys.stdout.flush()
    return code


def fail(message: str, code: int, as_json: bool) -> int:
    """Print the error as one line to stderr, with ``--json`` also as an object to stdout. Return ``code``."""
    message = without_credentials(message)  # of other libraries
    say_error(message)
    if as_json:
        with contextlib.suppress(OSError):  # writing to stdout may be what failed
            print(json.dumps({"error": " ".join(message.split()), "exit_code": code}), flush=True)
    return code


def judged(error: Exception) -> tuple[int, str]:
    """Return the exit code and the message of an error. Raise it again if it is a bug in penstock."""
    text, kind_name = str(error), type(error).__name__
    for kind, code in EXIT_CODES:
        if isinstance(error, kind):
            return code, text
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in LIBRARIES:
        return FAILED, f"{text}: pip install penstock"
    if isinstance(error, UnicodeEncodeError):  # Arrow accepts only UTF-8 names
        name = os.fsencode(error.object).decode("utf-8", "backslashreplace")
        return USAGE, f"'{name}' is not UTF-8; use a name that is"
    if isinstance(error, OSError):
        return RESOURCE, f"{error.filename or 'cannot write the output'}: {short(error.strerror or text)}"
    of_device = kind_name in ("XlaRuntimeError", "JaxRuntimeError") and "RESOURCE_EXHAUSTED" in text
    if isinstance(error, MemoryError) or of_device:
        return RESOURCE, f"out of memory: {text or _MUST_FIT}"
    if isinstance(error, RuntimeError) and text == "can't start new thread":
        return RESOURCE, f"{text}: raise the limit of memory or of threads (ulimit -d, -v, -u), or give --threads 1"
    raise error


def parser(argv: Sequence[str] | None = None) -> Parser:
    """Return the command-line parser. argv : the arguments; only commands among them are loaded; None loads all

    The other commands have a line of the help and no parser: 23 parsers take 15 ms.
    """
    top = Parser(
        "penstock", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    of_loaded: Any = _of_loaded  # argparse calls it
    commands: Any = top.add_subparsers(title="commands", metavar="COMMAND", dest="command", parser_class=of_loaded)
    for name, summary in COMMANDS.items():
        if argv is None or name in argv:
            module = integrations.COMMANDS.get(name, f"penstock.cli.{name}")
            add_command(commands, name, importlib.import_module(module))
        else:
            commands.add_parser(name, help=summary)
    top.commands = commands.choices
    return top


def _of_loaded(**options: Any) -> Parser | None:
    return Parser(**options) if "description" in options else None
