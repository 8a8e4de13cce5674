"""What a format of tables declares, and which format a path has. No format is known outside its module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.errors import InputError, PenstockError
from penstock.frames import Array, Float32
from penstock.io.registry import Library, declared, either


class Tensor(NamedTuple):
    """An array of a source. dtype : its name in NumPy; read : from and to a row → these rows"""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Array]


class TablesToWrite(Protocol):
    """Tables to write, such as those of a commit. Only one of them is in memory at a time."""

    @property
    def tables(self) -> Mapping[str, Any]: ...

    def part_dims(self, name: str) -> Mapping[str, int]:
        """Return the floats per row of the weights and of each slot, by name."""

    def parts(self, name: str) -> Mapping[str, Float32]:
        """Return the weights and slots by name, float32 (rows, floats per row)."""

    def keys(self, name: str) -> Array | None:
        """Return the keys of a dynamic table, in the order of its rows; None: it is not dynamic."""

    def num_rows(self, name: str) -> int: ...


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """A format of tables.

    name : of ``--format``; title : with its article, for messages and help; library : that it needs
    is_at : whether a path has it
    tensors : returns what a path has, by name, and of names without a readable array why; open until the stack is
        closed. None: Parquet, whose rows have ids
    write : to a path, with the global step; returns the files. None: penstock only reads it
    out : what ``write`` writes; has_keys : whether it can hold the keys of dynamic tables
    """

    name: str
    title: str
    library: Library | None = None
    is_at: Callable[[Path], bool]
    tensors: Callable[[Path, ExitStack], tuple[dict[str, Tensor], dict[str, str]]] | None = None
    write: Callable[[Path, TablesToWrite, int], list[Path]] | None = None
    out: str = ""
    has_keys: bool = False

    def opened(self, path: Path, stack: ExitStack) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return ``tensors`` of a path. Raises InputError where the library raises anything: each raises many types."""
        assert self.tensors is not None
        try:
            return self.tensors(path, stack)
        except (PenstockError, MemoryError):
            raise
        except Exception as error:
            raise unreadable(path, self.title, error) from error


@cache
def table_formats() -> tuple[TableFormat, ...]:
    """Return all formats, Parquet first: the format of ``--out``."""
    formats: list[TableFormat] = declared("penstock.io.formats", "FORMAT")
    return tuple(sorted(formats, key=lambda each: (each.tensors is not None, each.name)))


def format_of(path: Path) -> TableFormat:
    """Return the format of the tables at a path; of a folder with none of them, Parquet. Raises InputError."""
    for each in table_formats():
        if each.is_at(path):
            return each
    if path.is_dir() and any(path.glob("*.commit")):
        raise InputError("a checkpoint of penstock; export it, or continue from it with --resume", source=str(path))
    if path.is_dir():
        return table_formats()[0]
    if not path.exists():
        raise InputError("no such file or folder", source=str(path))
    titles = either(sorted(each.title for each in table_formats()))
    raise InputError(f"tables in no known format; expected {titles}", source=str(path))


def first_bytes(path: Path, count: int) -> bytes:
    """Return the first bytes of a file; none of anything else. Raises InputError if it cannot be read."""
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", source=str(path)) from None


def unreadable(path: Path, title: str, error: Exception) -> InputError:
    """Return the error for a source that its library cannot read, with the first sentence of the library's message."""
    reason = re.split(r"\n|\.( |$)", str(error).strip())[0] or type(error).__name__
    return InputError(f"cannot be read as {title}: {reason}; it may be damaged or incomplete", source=str(path))
