"""What sources and targets that a URI names declare: one object each, in its module.

Help, errors and the tables of the docs derive from these objects (docs/tables.py, CONTRIBUTING.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

from penstock.base.errors import UsageError
from penstock.io.error_tables import ErrorTable


class Library(NamedTuple):
    """A library that only some commands need. module : to import; extra : of penstock, which installs it"""

    module: str
    extra: str

    def load(self, needed_by: str, submodule: str = "") -> Any:
        """Import it, or a module of it. Raises UsageError if it is not installed."""
        try:
            return import_module(self.module + submodule)
        except ImportError as error:
            if error.name is None or error.name.partition(".")[0] != self.module:
                raise
            raise UsageError(f"{needed_by}: needs the package {self.module}: {self.install_line}") from None

    @property
    def install_line(self) -> str:
        return f"pip install 'penstock[{self.extra}]'"


@dataclass(frozen=True, kw_only=True)
class UriKind:
    """A kind of URI.

    title : its name; form : of the URI, for help and errors; example : a URI that is on its page
    errors : what the errors of its library mean
    library : that it needs, besides pyarrow
    schemes : the beginnings of such URIs; (): that of the form
    """

    title: str
    form: str
    example: str
    errors: ErrorTable
    library: Library | None = None
    schemes: tuple[str, ...] = ()
    docs_page: ClassVar[str]

    def __post_init__(self) -> None:
        name, mark = re.findall("(.*?)(:/*)", self.form)[0]
        object.__setattr__(self, "schemes", self.schemes or (name + mark,))

    @property
    def page(self) -> str:
        """The section of its title, below docs/."""
        return f"{self.docs_page}#{self.title.lower().replace(' ', '-')}"

    def load(self, submodule: str = "") -> Any:
        """Import the library. Raises UsageError if it is not installed."""
        assert self.library is not None
        return self.library.load(self.schemes[0], submodule)

    def location(self, uri: str) -> str:
        """Return what follows the scheme. Raises UsageError if nothing does."""
        location = uri.partition(":")[2]
        if not location:
            raise UsageError(f"{uri}: expected {self.form}")
        return location


def match_uri(pattern: re.Pattern[str], uri: str, form: str, characters: str, of: str) -> re.Match[str]:
    """Return the match of a URI. Raises UsageError, without any part of a URI that may have a password.

    form : what is expected; characters : that must be encoded; of : the part of the URI that may contain them
    """
    match = pattern.fullmatch(uri)
    if match is not None:
        return match
    if not re.search("[@#?]", uri):
        raise UsageError(f"{uri}: expected {form}")
    codes = " ".join(f"%{ord(character):02X}" for character in characters)
    advice = f"write the characters {' '.join(characters)} of {of} as {codes}"
    raise UsageError(f"{uri.partition(':')[0]}://…: expected {form}; {advice}")


def either(texts: Iterable[str]) -> str:
    """Return ``a, b or c``."""
    *before, last = texts
    return f"{', '.join(before)} or {last}" if before else last
