"""NumPy files: a folder of ``user.npy`` or ``user/accumulators.npy``, which are mapped; a ``.npz``; a single ``.npy``.

Arrays of a ``.npz`` are loaded whole, one at a time.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from penstock.io.table_formats.table_format import (
    Contents,
    TableFormat,
    Tensor,
    WholeTensor,
    first_bytes,
    library_errors,
    zip_names,
)
from penstock.model.frames import Array

_OBJECTS = "Python objects, which are pickled and never loaded"
_MAGIC = b"\x93NUMPY"


def _contents(path: Path, stack: ExitStack) -> Contents:
    if path.is_file() and first_bytes(path, 6) != _MAGIC:
        return _archive(path, stack)
    contents = Contents({}, {})
    for file in [path] if path.is_file() else sorted(path.rglob("*.npy")):
        name = (Path(file.name) if path.is_file() else file.relative_to(path)).with_suffix("").as_posix()
        with library_errors(file, "a NumPy file"):
            with file.open("rb") as opened:
                _, dtype = _header(opened)
            array = None if dtype.hasobject else np.load(file, mmap_mode="r", allow_pickle=False)
        if array is None:
            contents.others[name] = _OBJECTS
        else:
            contents.tensors[name] = Tensor(array.shape, dtype.name, partial(rows_of, array))
    return contents


def _archive(path: Path, stack: ExitStack) -> Contents:
    """Return the arrays of a ``.npz``, of which only the headers are read now."""
    headers = {}
    with library_errors(path, "a NumPy archive"):
        archive = stack.enter_context(np.load(stack.enter_context(path.open("rb")), allow_pickle=False))
        for name in archive.files:
            with archive.zip.open(f"{name}.npy" if f"{name}.npy" in archive.zip.namelist() else name) as file:
                headers[name] = _header(file)
    contents = Contents({}, {})
    for name, (shape, dtype) in headers.items():
        if dtype.hasobject:
            contents.others[name] = _OBJECTS
        else:
            contents.tensors[name] = Tensor(shape, dtype.name, WholeTensor(partial(archive.__getitem__, name)))
    return contents


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and type of an array."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype


def rows_of(array: Array, start: int, stop: int) -> Array:
    """Return rows of an array, or of anything with its slices."""
    return array[start:stop]


def _is_at(path: Path) -> bool:
    if path.is_dir():
        return any(path.rglob("*.npy"))
    if first_bytes(path, 6) == _MAGIC:
        return True
    names = zip_names(path)
    if not names:
        return names is not None and path.suffix == ".npz"  # damaged
    return all(name.endswith(".npy") for name in names)


FORMAT = TableFormat(
    name="numpy",
    title="a NumPy file, or a folder of them",
    is_at=_is_at,
    contents=_contents,
    has_keys=True,
)
