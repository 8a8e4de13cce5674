"""A folder of NumPy files, ``user.npy`` or ``user/accumulators.npy``, which are mapped, so rows are read on demand."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from penstock.frames import Array
from penstock.io.formats.table_format import TableFormat, Tensor, unreadable

_TITLE = "a folder of NumPy files"


def _tensors(path: Path, stack: ExitStack) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors = {}
    for file in sorted(path.rglob("*.npy")):
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # NumPy parses the header as Python, and raises many types for a damaged one
            raise unreadable(file, "a NumPy file", error) from error
        name = file.relative_to(path).with_suffix("").as_posix()
        tensors[name] = Tensor(array.shape, array.dtype.name, partial(rows_of, array))
    return tensors, {}


def rows_of(array: Array, start: int, stop: int) -> Array:
    """Return rows of an array, or of anything with its slices."""
    return array[start:stop]


FORMAT = TableFormat(
    name="numpy",
    title=_TITLE,
    is_at=lambda path: path.is_dir() and any(path.rglob("*.npy")),
    tensors=_tensors,
    has_keys=True,
)
