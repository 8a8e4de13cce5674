"""An option, its flag, and how the text of a flag becomes a value: functions that argparse calls."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.base.validation import NO_URI, is_uri

# Of passes; of threads, and of devices.
MOST_PASSES = MOST_PARALLEL = 1024


@dataclass(frozen=True)
class Flag:
    """The flag of an option.

    metavar : of its value; "" without choices: a switch
    parse : text → value; unit : of the default that the help shows
    name : without dashes; "": the option's
    help : "": the option's text; details : Markdown that the site adds; pages : in docs/, to read more
    repeated : it may be given several times; bare : its value without an argument
    """

    metavar: str = ""
    parse: Callable[[str], Any] = str
    name: str = ""
    help: str = ""
    details: str = ""
    pages: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    unit: int = 1
    repeated: bool = False
    bare: str | None = None


@dataclass(frozen=True)
class Option:
    """One option of options.py, or of command_options.py.

    group : of the flags under ``--help``
    text : for docstrings and help
    modes : in which it works
    """

    name: str
    default: Any
    group: str
    text: str
    modes: frozenset[str]
    flag: Flag | None

    @property
    def described(self) -> str:
        """The text, with the pages to read more."""
        pages = [f"docs/{page.partition('#')[0]}" for page in (self.flag.pages if self.flag else ())]
        return f"{self.text} ({', '.join(pages)})" if pages else self.text

    @property
    def flag_name(self) -> str:
        """The flag as users type it."""
        assert self.flag is not None
        return "--" + (self.flag.name or self.name.replace("_", "-"))

    @property
    def flag_help(self) -> str:
        """The help of the flag, with a default that is a number."""
        assert self.flag is not None
        text = (self.flag.help or self.text).replace("``", "")
        if self.flag.metavar and isinstance(self.default, int | float):
            text += f" (default {self.default / self.flag.unit:g})"
        return text


def option(text: str, default: Any = None, modes: frozenset[str] = frozenset(), flag: Flag | None = None) -> Any:
    """Return a field of a dataclass, for an ``Option``. modes : empty: those of its concern"""
    return field(default=default, metadata={"text": text, "modes": modes, "flag": flag})


def whole(least: int | None = None, most: int | None = None) -> Callable[[str], int]:
    """Return an argument type for an integer from ``least`` to ``most``."""

    def parse_whole(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got '{text}'") from None
        if least is not None and number < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {number}")
        if most is not None and number > most:
            raise argparse.ArgumentTypeError(f"expected at most {most}, got {number}")
        return number

    return parse_whole


def number(expected: str, least: float, most: float, with_least: bool = True) -> Callable[[str], float]:
    """Return an argument type for a number from ``least``, itself included or not, to ``most``.

    expected : for messages
    """

    def parse_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (value == least and not with_least):
            raise argparse.ArgumentTypeError(f"expected {expected}, got '{text}'")
        return value

    return parse_number


def megabytes(text: str) -> int:
    """Parse a number of MB. Return bytes."""
    return whole(1)(text) << 20


def local_path(text: str) -> Path:
    """Return a path. A URI is none: it would be a folder ``s3:`` of this machine, whose name has the URI's keys."""
    if is_uri(text):
        raise argparse.ArgumentTypeError(NO_URI)
    return Path(text)


def folder_or_uri(text: str) -> Path | str:
    """Return a path, or a URI as it is."""
    return text if is_uri(text) else Path(text)


def rows_of_a_frame(text: str) -> int | str:
    """Parse ``--contribution-rows``."""
    return text if text == "batch" else whole(1)(text)


def workers_of_rounds(text: str) -> int | tuple[str, ...]:
    """Parse ``--workers``: a number, or names."""
    is_number = text.removeprefix("-").isdecimal()
    return whole(1)(text) if is_number else tuple(name.strip() for name in text.split(","))


def all_or_names(text: str) -> bool | list[str]:
    """Parse ``--delta-slots``."""
    return text == "all" or text.split(",")


def number_of_passes(text: str) -> int | str:
    """Parse ``--passes``."""
    return text if text == "auto" else whole(1, MOST_PASSES)(text)
