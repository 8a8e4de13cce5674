"""Options that several commands share, and a parser whose complaints are one line."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from penstock.errors import UsageError

MAX_DEVICES = 1024


class Parser(argparse.ArgumentParser):
    """argparse, but a usage error is one line (and exit code 2)."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {' '.join(message.split())} ({self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def add_command(commands: Any, name: str, run: Callable[[Any], int], summary: str, example: str) -> Parser:
    """A command's parser, with ``--json`` and an example under ``--help``."""
    command: Parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="one JSON object on stdout; text goes to stderr")
    command.set_defaults(run=run)
    return command


def at_least(least: int) -> Callable[[str], int]:
    """An argument type: an integer from ``least`` on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got '{text}'") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {number}")
        return number

    return parse


def add_reading_options(command: argparse.ArgumentParser) -> None:
    """How sources are to be read."""
    reading = command.add_argument_group("reading")
    reading.add_argument("--table", help="table of rows that do not say theirs")
    reading.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="the stream's column for a role: id, gradient, table, step, contributor, learning_rates",
    )
    reading.add_argument(
        "--contribution-rows", type=at_least(1), metavar="N", help="frames of N rows, where batches mean nothing"
    )
    reading.add_argument("--gradient-dtype", choices=("bfloat16", "float16", "float32", "float64"))
    reading.add_argument("--allow-missing-end", action="store_true", help="accept streams without an end marker")


def columns_of(args: argparse.Namespace) -> Mapping[str, str]:
    """``--column ROLE=NAME`` as a mapping."""
    return dict(_pair(text, "--column", "ROLE=NAME") for text in args.column)


def learning_rates_of(args: argparse.Namespace) -> dict[int, float]:
    """``--learning-rate TAG=VALUE`` as a mapping."""
    rates = {}
    for text in args.learning_rate:
        tag, value = _pair(text, "--learning-rate", "TAG=VALUE")
        try:
            rates[int(tag)] = float(value)
        except ValueError:
            raise UsageError(f"--learning-rate {text}: expected TAG=VALUE, two numbers, such as 0=0.05") from None
    return rates


def _pair(text: str, flag: str, form: str) -> tuple[str, str]:
    left, equals, right = text.partition("=")
    if not (left and equals and right):
        raise UsageError(f"{flag} {text}: expected {form}")
    return left, right


def make_devices(wanted: int | None) -> Any:
    """A mesh of the first ``wanted`` devices; on a CPU that many host devices are made (default 1).

    Loads jax. Raises UsageError where an accelerator has fewer.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh

    # A device count that the environment forces has been decided by the user; jax refuses to hear two.
    if not re.search(r"xla_force_host_platform_device_count", os.environ.get("XLA_FLAGS", "")):
        jax.config.update("jax_num_cpu_devices", wanted or 1)
    devices = jax.local_devices()
    if wanted is not None and wanted > len(devices):
        kind = devices[0].platform.upper()
        raise UsageError(f"--devices {wanted}: there are {len(devices)} {kind} devices here")
    return Mesh(np.asarray(devices[:wanted]), ("shard",))
