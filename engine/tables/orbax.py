"""Tables as an Orbax checkpoint, for users of JAX: a tree {table: {"parameters": rows, slot: rows, …}}, whole arrays.

Orbax is an optional extra that only this module loads. The checkpoint holds neither a step nor a position: it is for
export, while penstock's own checkpoints (docs/checkpoints.md) are for resuming a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import InputError, UsageError
from penstock.frames import Float32

Tree = Mapping[str, Mapping[str, Float32]]
WEIGHTS = "parameters"  # TensorFlow's name for a table's weights, as distinct from its slots
_MARKS = ("_CHECKPOINT_METADATA", "_METADATA")


def is_orbax(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder looks like an Orbax checkpoint."""
    return any((Path(path) / mark).is_file() for mark in _MARKS)


def save_tree(path: str | os.PathLike[str], tree: Tree) -> None:
    """Write a new folder, which Orbax renames into place once it is complete. Raises UsageError, OSError."""
    folder = Path(path).absolute()
    if folder.exists():
        raise UsageError(f"{path}: exists already; an Orbax checkpoint is a new folder")
    checkpointer = _orbax().PyTreeCheckpointer()
    try:
        checkpointer.save(folder, {name: dict(parts) for name, parts in tree.items()})
    finally:
        checkpointer.close()


def load_tree(path: str | os.PathLike[str]) -> Tree:
    """Return every array in a folder as float32, whatever devices saved it. Raises InputError, UsageError."""
    orbax, folder = _orbax(), Path(path).absolute()
    checkpointer = orbax.PyTreeCheckpointer()
    try:
        # Without a type, Orbax restores arrays on the devices that saved them, and fails where there are others.
        saved = checkpointer.metadata(folder).item_metadata.tree
        whole = orbax.RestoreArgs(restore_type=np.ndarray)
        tree = checkpointer.restore(folder, restore_args={name: dict.fromkeys(saved[name], whole) for name in saved})
        return {name: {key: np.asarray(rows, np.float32) for key, rows in tree[name].items()} for name in tree}
    except Exception as error:  # Orbax raises many types for a damaged folder
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"cannot be read as Orbax tables: {reason}", source=str(path)) from error
    finally:
        checkpointer.close()


def parts_of(
    tree: Tree, path: str | os.PathLike[str], table: str, num_rows: int, parts: Mapping[str, int]
) -> Mapping[str, Float32]:
    """Return those of one table's ``parts`` that exist, validated. Raises InputError, also if there are no weights.

    parts : with the floats of each per row
    path : for messages
    """
    if table not in tree or WEIGHTS not in tree[table]:
        has = ", ".join(tree) or "none"
        hint = "" if table in tree else "; --new-tables (new_tables=) keeps its initial rows"
        raise InputError(f"no '{WEIGHTS}' of table '{table}'; the tables there: {has}{hint}", source=str(path))
    existing = {key: tree[table][key] for key in parts if key in tree[table]}
    for key, rows in existing.items():
        shape = (num_rows, parts[key])
        if rows.shape != shape:
            raise InputError(f"table '{table}', {key}: expected shape {shape}, got {rows.shape}", source=str(path))
        if not np.isfinite(rows).all():
            raise InputError(f"table '{table}', {key}: holds values that are not finite", source=str(path))
    return existing


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError:
        raise UsageError("Orbax checkpoints need the package orbax-checkpoint: pip install 'penstock[orbax]'") from None
    return orbax.checkpoint
