"""Tables as an Orbax checkpoint, for users of JAX: a tree {table: {"parameters": rows, slot: rows, …}}, whole arrays.

The checkpoint holds neither a step nor a position: it is for export, while penstock's own checkpoints
(docs/checkpoints.md) are for resuming a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from penstock.errors import UsageError
from penstock.frames import Array, Float32
from penstock.io.formats.table_format import TableFormat, TablesToWrite, Tensor
from penstock.io.registry import Library

_LIBRARY = Library("orbax", "orbax")
_TITLE = "an Orbax checkpoint"
_MARKS = ("_CHECKPOINT_METADATA", "_METADATA")


def save_tree(path: str | os.PathLike[str], tree: Mapping[str, Mapping[str, Float32]]) -> None:
    """Write a new folder, which Orbax renames into place once it is complete. Raises UsageError, OSError."""
    folder = Path(path).absolute()
    if folder.exists():
        raise UsageError(f"{path}: exists already; an Orbax checkpoint is a new folder")
    checkpointer = _LIBRARY.load(_TITLE, ".checkpoint").PyTreeCheckpointer()
    try:
        checkpointer.save(folder, {name: dict(parts) for name, parts in tree.items()})
    finally:
        checkpointer.close()


def _tensors(path: Path, stack: ExitStack) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Load every array, whatever devices saved it."""
    orbax, folder = _LIBRARY.load(_TITLE, ".checkpoint"), path.absolute()
    checkpointer = orbax.PyTreeCheckpointer()
    try:
        # Without a type, Orbax restores arrays on the devices that saved them, and fails where there are others.
        saved = checkpointer.metadata(folder).item_metadata.tree
        whole = orbax.RestoreArgs(restore_type=np.ndarray)
        tree = checkpointer.restore(folder, restore_args={name: dict.fromkeys(saved[name], whole) for name in saved})
        arrays = {f"{name}/{key}": np.asarray(rows) for name, parts in tree.items() for key, rows in parts.items()}
    finally:
        checkpointer.close()
    return {name: Tensor(array.shape, array.dtype.name, partial(_rows, array)) for name, array in arrays.items()}, {}


def _rows(array: Array, start: int, stop: int) -> Array:
    return array[start:stop]


def _write(out: Path, saved: TablesToWrite, step: int) -> list[Path]:
    save_tree(out, {name: saved.parts(name) for name in saved.tables})
    return [out]


FORMAT = TableFormat(
    name="orbax",
    title=_TITLE,
    library=_LIBRARY,
    is_at=lambda path: any((path / mark).is_file() for mark in _MARKS),
    tensors=_tensors,
    write=_write,
    out="a new folder",
)
