"""What the names of files say: globs stand for the files that match, and folders ``key=value`` for columns."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.fs

import penstock.io.proxies as proxies
from penstock.base.errors import InputError
from penstock.base.filesystem.file_stores import filesystem_at, place_of
from penstock.io.registry import either
from penstock.io.sources.batch import Batches, Part, arrow_errors
from penstock.io.sources.source_kinds import source_kind, source_kinds

_WILD = re.compile(r"[*?\[]")
# What Hive and its successors write for null.
_NULL = "__HIVE_DEFAULT_PARTITION__"


# ---- globs


def matches(source: Any) -> list[Any]:
    """Return the names that a glob matches, in order; any other source, and a file of that very name, alone.

    ``*``, ``?`` and ``[…]`` match inside a name, ``**`` any folders; in a URI only ``*`` and ``**``. Marks match only
    a step of the glob that begins as they do. Raises InputError if nothing matches.
    """
    if not isinstance(source, str | os.PathLike):
        return [source]
    text = os.fsdecode(source)
    is_uri = "://" in text
    if (
        not ("*" in text.partition("?")[0] if is_uri else _WILD.search(text))
        or source_kind(text) is not None
        or os.path.lexists(text)
    ):
        return [source]
    steps = [step for step in (text.partition("?")[0] if is_uri else text).split("/") if is_mark(step)]
    names = _matches_of_uri(text) if is_uri else sorted(glob.glob(text, recursive=True))
    names = [name for name in names if not _is_marked(name.partition("?")[0] if is_uri else name, steps)]
    if not names:
        raise InputError("no file or directory matches", source=place_of(text))
    if not is_uri:
        check_distinct(names, text)
    return _outermost(names, [name.partition("?")[0] for name in names] if is_uri else names)


def is_mark(name: str) -> bool:
    """Return whether a directory is read without a file or folder of this name: ``.part-0.crc``, ``_SUCCESS``."""
    return name.startswith((".", "_"))


def _is_marked(path: str, steps: Sequence[str]) -> bool:
    """Return whether a match is a mark, or in a folder that is one. steps : those of the glob that name marks

    The logs of tables with versions stay, and are refused: next to them are files of rows that were replaced.
    """
    marks = [step for step in path.split("/") if is_mark(step) and step not in ("_delta_log", "_versions")]
    return any(not any(mark == step or fnmatchcase(mark, step) for step in steps) for mark in marks)


def _outermost(names: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return the names whose path is not in a folder of another one: it is read with the folder."""
    folders = {path.rstrip("/") for path in paths}
    parents = ({path[: match.start()] for match in re.finditer("/", path.rstrip("/"))} for path in paths)
    return [name for name, above in zip(names, parents, strict=True) if folders.isdisjoint(above)]


def check_distinct(paths: Sequence[str], source: str) -> None:
    """Raise InputError if two paths lead to one file or directory, as a link ``latest`` and what it leads to do."""
    by_file: dict[tuple[int, int], str] = {}
    for path in paths:
        with suppress(OSError):  # reported when it is opened
            status = os.stat(path)
            other = by_file.setdefault((status.st_dev, status.st_ino), path)
            if other != path:
                problem = f"'{other}' and '{path}' are the same, and its rows would count twice"
                raise InputError(f"{problem}; give a glob, or files, without one of them", source=source)


def _matches_of_uri(text: str) -> list[str]:
    """Return the URIs of files and folders that match."""
    location, mark, query = text.partition("?")
    folder = location[: location.index("*")].rpartition("/")[0]
    with arrow_errors("cannot list", place_of(text)):
        fs, path = filesystem_of(folder + mark + query)
        entries = fs.get_file_info(pa.fs.FileSelector(path, recursive=True, allow_not_found=True))
    form = re.escape(location[len(folder) :])
    form = form.replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    names = [entry.path[len(path.rstrip("/")) :] for entry in entries]
    return [folder + quote(name, safe="/=") + mark + query for name in sorted(names) if re.fullmatch(form, name)]


def filesystem_of(text: str) -> tuple[pa.fs.FileSystem, str]:
    """Return the file system of a path or URI, and the path in it."""
    if "://" in text:
        name = place_of(text)
        proxies.exempt_loopback()
        try:
            fs, path = filesystem_at(text)
        except pa.ArrowInvalid as error:
            if "Unrecognized filesystem" not in str(error):
                raise InputError(f"cannot open: {str(error).replace(text, name)}", source=name) from None
            known = either(kind.form for kind in source_kinds())
            raise InputError(f"unknown scheme; expected a URI of pyarrow.fs, {known}", source=name) from None
        return fs, path
    return pa.fs.LocalFileSystem(), os.path.abspath(text)


# ---- keys of Hive paths


def keys_of(names: Sequence[str]) -> Callable[[str], Mapping[str, pa.Array]]:
    """Return the function that gives the keys of a file of these: column → its value, an array of length 1.

    A key whose values are integers in all files is int64, any other a dictionary of strings, as in Arrow's datasets.
    """
    by_name = {name: _keys(name) for name in names}
    texts: dict[str, set[str | None]] = {}
    for keys in by_name.values():
        for key, text in keys.items():
            texts.setdefault(key, set()).add(text)
    integers = {key for key, values in texts.items() if all(map(_is_integer, values))}

    def keys_of_file(name: str) -> Mapping[str, pa.Array]:
        return {
            key: pa.array([None if text is None else int(text)], pa.int64())
            if key in integers
            else pa.array([text], pa.string()).dictionary_encode()
            for key, text in by_name[name].items()
        }

    return keys_of_file


def _is_integer(text: str | None) -> bool:
    return text is None or re.fullmatch(r"-?\d{1,18}", text) is not None


def _keys(name: str) -> dict[str, str | None]:
    pairs = [folder.partition("=") for folder in name.split("/")[:-1]]
    return {unquote(key): None if text == _NULL else unquote(text) for key, mark, text in pairs if key and mark}


def with_keys(part: Part, keys: Mapping[str, pa.Array]) -> Part:
    """Add columns of one value to a part, but none that it has."""
    added = {key: value for key, value in keys.items() if key not in part.schema.names}
    if not added:
        return part
    batches = part.batches

    def with_added(columns: list[str]) -> Batches:
        used = [(key, value) for key, value in added.items() if key in columns]
        incoming = batches([column for column in columns if column not in added])
        if not used:
            yield from incoming
            return
        for batch in incoming:
            data = batch.data
            for key, value in used:
                data = data.append_column(key, value.take(pa.array(np.zeros(data.num_rows, np.int64))))
            yield replace(batch, data=data)

    for key, value in added.items():
        part.schema = part.schema.append(pa.field(key, value.type))
    part.batches = with_added
    return part
