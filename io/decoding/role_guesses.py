"""The error for roles that no column plays: it names all of them at once, with a guess for each.

A guess goes by the names and types of the columns, and by the first rows where they can be read: steps do not decrease,
and the values of a column ``table`` are the names of tables.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from penstock.base.errors import InputError, listed
from penstock.io.decoding.role_types import fits, nearest
from penstock.model.frames import ROLES

# Why a role is needed that not every stream plays.
_WHY = {
    "step": "its batches are arbitrary, so frames need 'step', or --contribution-rows N",
    "table": "the configuration has several tables ({tables}), so rows need 'table', or --table",
    "time": "the clock of a dynamic table needs 'time'",
}
# Words in the names that others use.
_USUAL = {
    "id": {"id", "ids", "key", "keys", "index", "token", "item", "user", "sign"},
    "gradient": {"gradient", "gradients", "grad", "grads", "dy"},
    "table": {"table", "tables", "feature", "field", "slot"},
    "step": {"step", "steps", "batch", "iteration", "iter", "epoch", "round"},
    "contributor": {"contributor", "worker", "rank", "host", "replica"},
    "learning_rates": {"rate", "rates", "lr", "lrs"},
    "time": {"time", "timestamp", "ts", "second", "seconds"},
}


def missing_roles(
    schema: pa.Schema,
    source: str,
    missing: Sequence[str],
    columns: Mapping[str, str],
    sample: pa.RecordBatch | None = None,
    tables: Collection[str] = (),
) -> InputError:
    """Return the error for roles without a column.

    columns : role → name, as given
    sample : the first rows of the stream; None: they were not read
    tables : the names of the configuration's tables
    """
    guesses = guess_roles(schema, missing, columns, sample, tables)
    has = listed(f"{field.name}: {field.type}" for field in schema) if len(schema) else "no columns"
    names = " and ".join(filter(None, (", ".join(map(repr, missing[:-1])), repr(missing[-1]))))
    problem = f"no column for the role{'s' if len(missing) > 1 else ''} {names} (the stream has: {has})"
    reasons = "".join(f"; {_WHY[role].format(tables=listed(tables))}" for role in missing if role in _WHY)
    flags = " ".join(f"--column {role}={guesses[role]}" for role in missing if role in guesses)
    return InputError(problem + reasons + (f"; try {flags}" if flags else ""), source=source)


def guess_roles(
    schema: pa.Schema,
    missing: Sequence[str],
    columns: Mapping[str, str],
    sample: pa.RecordBatch | None,
    tables: Collection[str],
) -> dict[str, str]:
    """Return role → the column that most likely plays it; no column plays two. Arguments as of ``missing_roles``"""
    taken = {columns.get(role, role) for role in ROLES if role not in missing} | set(columns.values())
    free = [field for field in schema if field.name not in taken and schema.names.count(field.name) == 1]
    guesses: dict[str, str] = {}

    def by_value(role: str, field: pa.Field) -> bool:
        return sample is not None and _looks_like(role, sample, field, tables)

    def by_name(role: str, field: pa.Field) -> bool:
        return _resembles(role, field.name)

    def by_type(role: str, field: pa.Field) -> bool:
        return len([other for other in free if other.name not in guesses.values() and fits(role, other.type)]) == 1

    for suits in (by_value, by_name, by_type):
        for role in [role for role in missing if role not in guesses]:
            left = [field for field in free if field.name not in guesses.values() and fits(role, field.type)]
            likely = [field.name for field in left if suits(role, field)]
            if likely and (suits is by_name or len(likely) == 1):
                guesses[role] = likely[0]
    return guesses


def _looks_like(role: str, sample: pa.RecordBatch, field: pa.Field, tables: Collection[str]) -> bool:
    """Return whether the values of a column can only be those of a role."""
    if field.name not in sample.schema.names or not sample.num_rows:
        return False
    column = sample.column(field.name)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:  # computing with it might crash
        return False
    if role == "table" and tables:
        return set(column.unique().to_pylist()) <= set(tables)
    if role == "step" and not column.null_count:
        decreases = pc.any(pc.less(column[1:], column[:-1])).as_py()
        return not decreases and 1 < pc.count_distinct(column).as_py() < sample.num_rows
    return False


def _resembles(role: str, name: str) -> bool:
    """Return whether a column has a usual name for a role: one of its words is, or the whole is close to the role."""
    words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).casefold())
    return bool(set(words) & _USUAL[role]) or nearest(name, [role]) is not None
