"""What a format of tables declares, what its reader reports of a source, and which format a path has.

A reader returns ``Contents``: what it found, and what it skips and why. Only calls of its library are in a context of
``library_errors``, so that an error of penstock is never reported as damage of the source. No readable format is known
outside its module; ``unread_formats`` recognizes those that penstock does not read.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.base.errors import InputError, PenstockError, listed
from penstock.base.integrations import FORMATS, declared
from penstock.io.registry import Library, either
from penstock.io.table_formats.unread_formats import other_folder, unread
from penstock.model.frames import Array
from penstock.model.row_encodings import RowEncoding

# A library's words for a length, a checksum or an end that does not fit.
_DAMAGE = re.compile(
    r"corrupt|damaged|checksum|crc|truncat|incomplete|data.?loss|\beof|end of (file|input|data)|ran out of input"
    r"|too (short|small)|header|magic|not a zip|is missing|central directory|not fully covered|greater than file size"
    r"|read all data|mismatch|less bytes",
    re.IGNORECASE,
)
TreePath = tuple[Any, ...]


class Tensor(NamedTuple):
    """An array of a source. dtype : its name in NumPy; read : from and to a row → these rows"""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Array]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class WholeTensor:
    """``Tensor.read`` of an array that its library loads whole only. The last rows release it."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._whole: Array | None = None

    def __call__(self, start: int, stop: int) -> Array:
        whole = np.asarray(self._load()) if self._whole is None else self._whole
        self._whole = whole if stop < len(whole) else None
        return whole[start:stop]


class OptimizerState(NamedTuple):
    """What a source says about the optimizer that a tensor is part of the state of.

    step : the updates so far; None: it does not say
    settings : the optimizer's numbers and switches, by the library's names
    """

    step: int | None
    settings: Mapping[str, float]


NO_STATE = OptimizerState(None, MappingProxyType({}))


class Contents(NamedTuple):
    """What a reader found in a source.

    tensors : by name, which is the path to it there, joined by '.' or '/'
    others : name → what it is, and so why it is skipped
    numbered : another name of some tensors, which a library counts and names → the name among ``tensors``
    states : of some tensors, those of an optimizer
    """

    tensors: dict[str, Tensor]
    others: dict[str, str]
    numbered: Mapping[str, str] = MappingProxyType({})
    states: Mapping[str, OptimizerState] = MappingProxyType({})

    def text(self) -> str:
        """Return the names, types and shapes, for messages."""
        tensors = [f"{name} {tensor}" for name, tensor in self.tensors.items()]
        others = [f"{name} ({kind.partition(';')[0]})" for name, kind in self.others.items()]
        return listed([*tensors, *others]) or "nothing"


class TablesToWrite(Protocol):
    """Tables to write, such as those of a commit. Only one of them is in memory at a time."""

    @property
    def tables(self) -> Mapping[str, Any]: ...

    @property
    def rows(self) -> RowEncoding:
        """How the weights are stored."""

    def part_dims(self, name: str) -> Mapping[str, int]:
        """Return the floats per row of the weights and of each slot, by name; of encoded weights, their bytes."""

    def parts(self, name: str) -> Mapping[str, Array]:
        """Return the weights and slots by name, float32 (rows, floats per row); encoded weights are uint8."""

    def keys(self, name: str) -> Array | None:
        """Return the keys of a dynamic table, in the order of its rows; None: it is not dynamic."""

    def num_rows(self, name: str) -> int: ...


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """A format of tables.

    name : of ``--format``; title : with its article, for messages and help; library : that it needs
    is_at : whether a path has it
    contents : returns what a path has; open until the stack is closed. None: Parquet, whose rows have ids
    write : to a path, with the global step; returns the files. None: penstock only reads it
    out : what ``write`` writes; has_keys : whether it can hold the keys of dynamic tables
    """

    name: str
    title: str
    library: Library | None = None
    is_at: Callable[[Path], bool]
    contents: Callable[[Path, ExitStack], Contents] | None = None
    write: Callable[[Path, TablesToWrite, int], list[Path]] | None = None
    out: str = ""
    has_keys: bool = False


@cache
def table_formats() -> tuple[TableFormat, ...]:
    """Return all formats, Parquet first: the format of ``--out``."""
    formats: list[TableFormat] = declared(FORMATS, "FORMAT")
    return tuple(sorted(formats, key=lambda each: (each.contents is not None, each.name)))


def tensor_format(path: Path) -> TableFormat | None:
    """Return the format of tensors that a path has; None: it has none. Raises InputError if it cannot be read."""
    return next((each for each in table_formats() if each.contents is not None and each.is_at(path)), None)


def format_of(path: Path) -> TableFormat:
    """Return the format of the tables at a path. Raises InputError: there is none, which says what is there."""
    source = str(path)
    if path.is_dir() and any(path.glob("*.commit")):
        raise InputError("a checkpoint of penstock; export it, or continue from it with --resume", source=source)
    if path.is_dir() and (problem := other_folder(path)) is not None:
        raise InputError(problem, source=source)
    parquet = table_formats()[0]
    if (known := tensor_format(path) or (parquet if parquet.is_at(path) else None)) is not None:
        return known
    if not path.exists():  # a checkpoint of TensorFlow is the beginning of the names of files
        raise InputError("no such file or folder", source=source)
    if not path.is_file() and not path.is_dir():
        raise InputError("a pipe or a device; give a file: an import reads it in any order", source=source)
    titles = either(sorted(each.title for each in table_formats()))
    if path.is_file():
        raise InputError(unread(path) or f"tables in no known format; expected {titles}", source=source)
    there = listed(sorted(child.name for child in path.iterdir())) or "nothing"
    problem = inner_formats(path) or f"tables in no known format; there: {there}; expected {titles}"
    raise InputError(problem, source=source)


def joined_contents(formats: Mapping[Path, TableFormat], stack: ExitStack) -> Contents:
    """Return what is in sources of tensors, by path; open until the stack is closed.

    Raises InputError if two have tensors of one name.
    """
    contents, places, numbered = Contents({}, {}), dict[str, Path](), list[Mapping[str, str]]()
    states = dict[str, OptimizerState]()
    for path, kind in formats.items():
        assert kind.contents is not None
        found = kind.contents(path, stack)
        if (name := next((name for name in found.tensors if name in places), None)) is not None:
            problem = f"'{name}' is also in {places[name]}; give one of them, or save them under other names"
            raise InputError(problem, source=str(path))
        places |= dict.fromkeys(found.tensors, path)
        contents.tensors.update(found.tensors)
        contents.others.update(found.others)
        numbered.append(found.numbered)
        states |= found.states
    counts = Counter(chain(contents.tensors, *numbered))  # optimizers of several sources count alike
    once = {number: name for each in numbered for number, name in each.items() if counts[number] == 1}
    return contents._replace(numbered=once, states=states)


def inner_formats(path: Path) -> str | None:
    """Return which files or folders in a folder have tables of another library; None: none."""
    names: dict[str, list[str]] = {}
    for child in sorted(path.iterdir(), key=_natural):
        if (kind := tensor_format(child)) is not None:
            names.setdefault(kind.title, []).append(child.name)
    if not names:
        return None
    *_, last = names.values()
    texts = [f"{title} in {listed(of_kind)}" for title, of_kind in names.items()]
    return f"holds {'; '.join(texts)}; give what to read: {path / last[-1]}"


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort step folders by their numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def zip_names(path: Path) -> tuple[str, ...] | None:
    """Return the names in a ZIP archive, () if it is damaged; None: it is none. Raises InputError, as first_bytes."""
    if first_bytes(path, 4) != b"PK\x03\x04":
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            return tuple(archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return ()


def first_bytes(path: Path, count: int) -> bytes:
    """Return the first bytes of a file; none of anything else. Raises InputError if it cannot be read."""
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", source=str(path)) from None


def check_shards(folder: Path, names: Iterable[str], index: Path) -> list[Path]:
    """Return the files that an index of a folder names. Raises InputError: outside of it, or missing."""
    files = []
    for name in dict.fromkeys(names):
        file = Path(os.path.normpath(folder / name))  # a link may lead out of the folder, as those of a hub's cache do
        if not file.is_relative_to(os.path.normpath(folder)):
            raise InputError(f"refers to '{name}', outside its folder; nothing was loaded", source=str(index))
        if not file.is_file():
            raise InputError(f"'{name}' is missing; copy the whole folder", source=str(folder))
        files.append(file)
    return files


def indexed_shards(index: Path, title: str) -> list[Path]:
    """Return the files that the ``weight_map`` of an index names. Raises InputError, as ``check_shards``."""
    try:
        values = json.loads(index.read_bytes())["weight_map"].values()
        names = [str(name) for value in values for name in ([value] if isinstance(value, str) else value)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"no index of {title}: {error}", source=str(index)) from error
    return check_shards(index.parent, names, index)


def leaves(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """Yield the path to each leaf of nested dicts and lists, and the leaf."""
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, list | tuple) and not hasattr(tree, "shape"):
        items = list(enumerate(tree))
    else:
        yield path, tree
        return
    for key, value in items:
        yield from leaves(value, (*path, key))


def arrays_of(saved: TablesToWrite, name: str) -> dict[str, Array]:
    """Return the weights, slots and keys of a table, by name."""
    keys = saved.keys(name)
    return {**saved.parts(name), **({} if keys is None else {"keys": keys})}


@contextmanager
def library_errors(place: Path, title: str) -> Iterator[None]:
    """Raise InputError for what a library raises, many types for one cause, with the first sentence of its message.

    place : of what is read; title : of its format
    """
    try:
        yield
    except (PenstockError, MemoryError):
        raise
    except Exception as error:
        raise InputError(f"cannot be read as {title}: {reason(error)}", source=str(place)) from error


def reason(error: Exception) -> str:
    """Return the first sentence of a library's message, and that the source is damaged if the message says so."""
    text = str(error).strip()
    first = re.split(r"\n|\.( |$)", text)[0].removesuffix("; ") or type(error).__name__
    return f"{first}; it is damaged or incomplete" if _DAMAGE.search(text or first) else first
