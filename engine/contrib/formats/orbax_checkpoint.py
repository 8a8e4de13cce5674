"""Orbax checkpoints, for users of JAX: trees of any depth, with the path to an array as its name.

penstock writes {table: {"parameters": rows, slot: rows, …}}. Such a checkpoint holds neither a step nor a position: it
is for export, while penstock's own checkpoints (docs/checkpoints.md) are for resuming a run. Orbax loads an array
whole, one at a time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.errors import InputError, UsageError, listed
from penstock.io.registry import Library
from penstock.io.table_formats.table_format import (
    Contents,
    TableFormat,
    TablesToWrite,
    Tensor,
    TreePath,
    WholeTensor,
    leaves,
    library_errors,
)
from penstock.model.config.specs import WEIGHTS
from penstock.model.frames import Array

_LIBRARY = Library("orbax", "orbax")
_TITLE = "an Orbax checkpoint"
_TREE = "_METADATA"  # in the folder of a tree
_MARKS = ("_CHECKPOINT_METADATA", _TREE)
_ONLY_ITEM = "default"  # of a CheckpointManager that saves one tree


def save_tree(path: str | os.PathLike[str], tree: Mapping[str, Mapping[str, Array]]) -> None:
    """Write a new folder, which Orbax renames into place once it is complete. Raises UsageError, OSError."""
    folder = Path(path).absolute()
    if folder.exists():
        raise UsageError(f"{path}: exists already; an Orbax checkpoint is a new folder")
    checkpointer = _LIBRARY.load(_TITLE, ".checkpoint").PyTreeCheckpointer()
    try:
        checkpointer.save(folder, {name: dict(parts) for name, parts in tree.items()})
    finally:
        checkpointer.close()


def _contents(path: Path, stack: ExitStack) -> Contents:
    orbax = _LIBRARY.load(_TITLE, ".checkpoint")
    checkpointer = orbax.PyTreeCheckpointer()
    stack.callback(checkpointer.close)
    logger = logging.getLogger("absl")  # its warnings would stand next to the one line of an error
    stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.ERROR)
    contents = Contents({}, {})
    trees = _trees(path.absolute())
    for item, folder in trees.items():
        if folder is None:
            contents.others[item] = "no tree of arrays"
            continue
        with library_errors(folder, _TITLE):
            metadata = checkpointer.metadata(folder).item_metadata
        if metadata is None:  # Orbax logs why
            problem = f"cannot be read as {_TITLE}: Orbax finds no metadata of its arrays; copy the whole folder again"
            raise InputError(problem, source=str(folder))
        tree = metadata.tree
        for tree_path, leaf in leaves(tree):
            name = "/".join(map(str, [*([] if len(trees) == 1 or item == _ONLY_ITEM else [item]), *tree_path]))
            if (folder / "checkpoint").is_dir():
                contents.others[name] = "a single array, of ArrayCheckpointHandler; save it in a tree: {TABLE: array}"
            elif hasattr(leaf, "shape") and leaf.shape and leaf.dtype is not None:
                load = partial(_load, orbax, checkpointer, folder, tree, tree_path)
                contents.tensors[name] = Tensor(tuple(leaf.shape), np.dtype(leaf.dtype).name, WholeTensor(load))
            elif leaf is not None:
                contents.others[name] = "a single number" if hasattr(leaf, "shape") else "no array"
    return contents


def _trees(path: Path) -> dict[str, Path | None]:
    """Return the folder of each item of a checkpoint, {"": its own} if it is one tree. None: of an item of no tree."""
    if (path / _TREE).is_file():
        return {"": path}
    items = {child.name: child if (child / _TREE).is_file() else None for child in sorted(path.iterdir())}
    items = {name: folder for name, folder in items.items() if folder is not None or (path / name).is_dir()}
    if not any(items.values()):
        there = listed(items) or "nothing"
        raise InputError(f"an Orbax checkpoint without a tree of arrays; its items: {there}", source=str(path))
    return items


def _load(orbax: Any, checkpointer: Any, folder: Path, tree: Any, path: TreePath) -> Array:
    """Load one array of a tree, whatever devices saved it."""
    import jax

    # Without a type, Orbax restores arrays on the devices that saved them, and fails where there are others.
    arguments = jax.tree.map(lambda _: orbax.RestoreArgs(restore_type=np.ndarray), tree)
    chosen = dict(leaves(tree))[path]
    wanted = jax.tree.map(lambda leaf: leaf if leaf is chosen else orbax.PLACEHOLDER, tree)
    restored = dict(leaves(checkpointer.restore(folder, item=wanted, restore_args=arguments)))
    array: Array = np.asarray(restored[path])
    return array


def _write(out: Path, saved: TablesToWrite, step: int) -> list[Path]:
    save_tree(out, {name: _values(saved, name) for name in saved.tables})
    return [out]


def _values(saved: TablesToWrite, name: str) -> dict[str, Array]:
    parts = saved.parts(name)
    return {**parts, WEIGHTS: saved.rows.as_values(parts[WEIGHTS])}


FORMAT = TableFormat(
    name="orbax",
    title=_TITLE,
    library=_LIBRARY,
    is_at=lambda path: any((path / mark).is_file() for mark in _MARKS),
    contents=_contents,
    write=_write,
    out="a new folder",
)
