"""``penstock diff``: report the first and the largest difference between two checkpoints or ``--out`` folders."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

import penstock.base.interrupts as interrupts
from penstock.base.errors import MOST_LISTED, InputError
from penstock.checkpoint.arrays import SavedTables
from penstock.checkpoint.store import Folder
from penstock.checkpoint.table_changes import TableChange, changes_in
from penstock.cli.command_line import Parser
from penstock.cli.output import Output, count, place_text, several
from penstock.io.table_files import read_keys, read_shape, read_table
from penstock.model.config.id_ranges import ANY_INT64, ANY_UINT64
from penstock.model.config.specs import WEIGHTS
from penstock.model.frames import Array, Float32, Int64

EXAMPLE = "penstock diff run1 run2"


def add(command: Parser) -> None:
    for name in ("a", "b"):
        command.add_argument(name, metavar=name.upper(), help="a checkpoint, DIR@VERSION, or a folder that --out wrote")


def run(args: argparse.Namespace, out: Output) -> int:
    a, b = open_tables(args.a), open_tables(args.b)
    differences: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    if None not in (a.global_step, b.global_step) and a.global_step != b.global_step:
        out.say(f"global step: {a.global_step} and {b.global_step}")
        differences["global_step"] = [a.global_step, b.global_step]
    later_in = {"A": _later(a, b), "B": _later(b, a)}
    for side, changes in later_in.items():
        for change in changes:
            out.say(f"{side}: {change}")
    if any(later_in.values()):
        differences["changes"] = [
            {"only_in": side, **change.get_state()} for side, changes in later_in.items() for change in changes
        ]
    names_in_a, names_in_b = _names_after(later_in["B"], a), _names_after(later_in["A"], b)
    for name in sorted(names_in_a.keys() | names_in_b):
        interrupts.check()
        if name in names_in_a and name in names_in_b:
            different = _compare_tables(a, b, names_in_a[name], names_in_b[name])
        else:
            different = {"missing_in": place_text(args.b if name in names_in_a else args.a)}
        if different:
            tables[name] = different
            if len(tables) <= MOST_LISTED:
                _say(out, name, different)
    out.say_more("table ", len(tables))
    differences |= tables
    if not differences:
        out.say(f"equal: {several(len(a.names), 'table')}, every bit")
    out.result({"equal": not differences, "differences": differences})
    return int(bool(differences))


class _Tables(NamedTuple):
    """The tables of a checkpoint or of an ``--out`` folder.

    parts : a function of a table's name that returns its weights and slots by name, float32 [num_rows, dim]
    keys : a function of a table's name that returns the keys of the rows, ascending; None for a table without keys
    global_step : None if unknown
    changes : of the tables, that the checkpoint records
    """

    names: set[str]
    parts: Callable[[str], dict[str, Float32]]
    keys: Callable[[str], Array | None]
    global_step: int | None
    changes: Sequence[TableChange] = ()


def open_tables(path: str) -> _Tables:
    """Open a commit of a checkpoint, or a folder of Parquet tables."""
    folder = Path(path)
    if not Folder(path).numbers() and (files := sorted(folder.glob("*.parquet"))):
        names = {unquote(file.stem) for file in files}
        return _Tables(names, partial(_parts_of_parquet, folder), partial(read_keys, folder), None)
    saved = SavedTables(path)
    contents = saved.commit.contents
    return _Tables(set(saved.tables), saved.parts, saved.keys, contents["global_step"], changes_in(contents))


def _parts_of_parquet(folder: Path, name: str) -> dict[str, Float32]:
    num_rows, columns = read_shape(folder, name)
    parts = {column: np.zeros((num_rows, dim), np.float32) for column, dim in columns.items()}
    keys, first = read_keys(folder, name), 0
    id_range = num_rows if keys is None else ANY_UINT64 if keys.dtype == np.uint64 else ANY_INT64
    for ids, values in read_table(folder, name, id_range, columns):
        indices = ids if keys is None else slice(first, first + len(ids))
        for column, rows in values.items():
            parts[column][indices] = rows
        first += len(ids)
    if "row" not in parts:
        raise InputError("no column 'row'", source=str(folder / name))
    return {WEIGHTS: parts.pop("row"), **parts}


def _later(tables: _Tables, other: _Tables) -> list[TableChange]:
    """Return the changes that only one of two checkpoints has."""
    return [change for change in tables.changes if change not in other.changes]


def _names_after(changes: Sequence[TableChange], tables: _Tables) -> dict[str, str]:
    """Return the name that each table has after some changes → its name before."""
    names = {name: _renamed(name, changes) for name in tables.names}
    # A renamed table last: its name may have been that of one that was dropped.
    return {names[name]: name for name in sorted(names, key=lambda name: names[name] != name)}


def _renamed(name: str, changes: Sequence[TableChange]) -> str:
    """Return the name of a table after some changes; of one that they drop, its last one."""
    for change in changes:
        if name in change.dropped:
            break
        name = change.renamed.get(name, name)
    return name


def _compare_tables(a: _Tables, b: _Tables, name: str, other_name: str) -> dict[str, Any]:
    """Return part → its differences. Dynamic tables are compared by the keys that both have, and as ``keys``.

    name : of the table in ``a``; other_name : in ``b``
    """
    keys, other_keys = a.keys(name), b.keys(other_name)
    parts, other_parts = a.parts(name), b.parts(other_name)
    if keys is None and other_keys is None:
        return _compare(parts, other_parts, None)
    keys = np.arange(len(parts[WEIGHTS])) if keys is None else keys
    other_keys = np.arange(len(other_parts[WEIGHTS])) if other_keys is None else other_keys
    common, indices, other_indices = _common(keys, other_keys)
    differences = _compare(
        {key: rows[indices] for key, rows in parts.items()},
        {key: rows[other_indices] for key, rows in other_parts.items()},
        common,
    )
    if len(common) < max(len(keys), len(other_keys)):
        differences["keys"] = {"only_in_a": len(keys) - len(common), "only_in_b": len(other_keys) - len(common)}
    return differences


def _common(a: Array, b: Array) -> tuple[Array, Int64, Int64]:
    """Return the keys that are in both, and where each has them. a, b : distinct, int64 or uint64"""
    if a.dtype != b.dtype:
        a, b = a.astype(object), b.astype(object)  # NumPy would compare the two types as floats
    return np.intersect1d(a, b, assume_unique=True, return_indices=True)


def _compare(a: Mapping[str, Float32], b: Mapping[str, Float32], ids: Any) -> dict[str, Any]:
    """Return part → its differences; empty if every bit is equal. ids : of the rows; None: 0, 1, 2, …"""
    differences: dict[str, Any] = {}
    for key in [*a, *(key for key in b if key not in a)]:
        if key not in a or key not in b:
            differences[key] = {"missing_in": "B" if key in a else "A"}
        elif a[key].shape != b[key].shape:
            differences[key] = {"shapes": [list(a[key].shape), list(b[key].shape)]}
        else:
            # Compare bits, not values: -0.0 and 0.0 differ, and a NaN equals itself.
            different = a[key].view(np.int32) != b[key].view(np.int32)
            if different.any():
                differences[key] = _places(a[key], b[key], different, ids)
    return differences


def _places(a: Float32, b: Float32, different: npt.NDArray[np.bool_], ids: Any) -> dict[str, Any]:
    rows = np.flatnonzero(different.any(axis=1))
    with np.errstate(invalid="ignore"):
        size = np.abs(a[rows].astype(np.float64) - b[rows])
    size[np.isnan(size) & different[rows]] = np.inf
    row, column = np.unravel_index(int(np.argmax(size)), size.shape)
    first = int(rows[0]), int(np.argmax(different[rows[0]]))
    return {
        "rows": len(rows),
        "first": _place(a, b, *first, ids),
        "largest": _place(a, b, int(rows[row]), int(column), ids),
    }


def _place(a: Float32, b: Float32, row: int, column: int, ids: Any) -> dict[str, Any]:
    # Values are text, because JSON has no NaN; str() of a float32 round-trips exactly.
    return {
        "id": row if ids is None else int(ids[row]),
        "column": column,
        "a": str(a[row, column]),
        "b": str(b[row, column]),
    }


def _say(out: Output, name: str, different: Mapping[str, Any]) -> None:
    for key, difference in different.items():
        if key == "missing_in":
            out.say(f"table {name}: not in {difference}")
        elif key == "keys":
            only_a, only_b = difference["only_in_a"], difference["only_in_b"]
            out.say(f"table {name}: {count(only_a)} keys only in A, {count(only_b)} only in B")
        elif "missing_in" in difference:
            out.say(f"table {name}, {key}: not in {difference['missing_in']}")
        elif "shapes" in difference:
            shape, other_shape = (" × ".join(map(str, sizes)) for sizes in difference["shapes"])
            out.say(f"table {name}, {key}: {shape} and {other_shape}")
        else:
            out.say(f"table {name}, {key}: {count(difference['rows'])} rows differ")
            for kind in ("first", "largest"):
                place = difference[kind]
                out.say(f"  {kind:8} id {place['id']}, column {place['column']}: {place['a']} and {place['b']}")
