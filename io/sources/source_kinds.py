"""The kinds of sources that a URI names and that are no files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from penstock.base.integrations import SOURCES, declared
from penstock.io.registry import UriKind
from penstock.io.sources.batch import Source


@dataclass(frozen=True, kw_only=True)
class SourceKind(UriKind, ABC):
    """A kind of source. unit : what its frames are counted by, for the docs

    read_once : what it is, if it cannot be read again from its beginning, for errors
    grows : whether a run may follow it; its sources are SeekableSources then
    """

    unit: str
    docs_page = "sources.md"
    read_once: ClassVar[str | None] = None
    grows: ClassVar[bool] = False

    @abstractmethod
    def open(self, uri: str, patience_s: float) -> Sequence[Source]:
        """Return the sources that a URI names. patience_s : as in ReadOptions

        Raises UsageError for another URI, wrong credentials, or if a library is not installed.
        """


@cache
def source_kinds() -> tuple[SourceKind, ...]:
    """Return all kinds, those that grow first."""
    kinds: list[SourceKind] = declared(SOURCES, "SOURCE")
    return tuple(sorted(kinds, key=lambda kind: (not kind.grows, kind.title)))


def source_kind(text: object) -> SourceKind | None:
    """Return the kind that a text names; None: a file, or no text."""
    if not isinstance(text, str) or ":" not in text:
        return None
    return next((kind for kind in source_kinds() if text.startswith(kind.schemes)), None)
