"""The roles of the row stream's columns, and the types that can play them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa

from penstock.base.array_conversion import is_permuted
from penstock.base.errors import UsageError, close_names
from penstock.model.frames import ROLES

FLOATS = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}
WANTED = {
    "id": "any integer type",
    "gradient": "fixed_size_list, list or large_list of float16, float32, float64, or of uint16 declared as bfloat16",
    "table": "a string or a dictionary of strings",
    "step": "an integer (int64)",
    "contributor": "an integer, a string or a dictionary of strings",
    "learning_rates": "a list of float32",
    "time": "an integer (int64), seconds",
}


def check_columns(columns: Mapping[str, str]) -> None:
    """Check that ``columns=`` names only roles. Raises UsageError."""
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns.values()):
        raise UsageError(f"columns: expected a mapping role → name, got {columns!r:.100}")
    for role in columns:
        if role not in ROLES:
            raise UsageError(f"column role '{role}': expected one of {', '.join(ROLES)}{suggestion(role, ROLES)}")


def storage_type(kind: pa.DataType) -> pa.DataType:
    """Return the storage type of an extension type (``arrow.fixed_shape_tensor``).

    A tensor whose values are in another order than its axes stays: it cannot be read as a list.
    """
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) and not is_permuted(kind) else kind


def type_hint(kind: pa.DataType) -> str:
    """Return what to do about a tensor with a permutation, or another type that Arrow or pandas casts."""
    if is_permuted(kind):
        return "; store its values in the order of its axes, without a permutation"
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        # What pandas.read_parquet makes of the keys of a Hive path.
        return f"; cast it to {kind.value_type} first, a category of pandas with astype"
    is_view = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    return f"; cast it to list<{kind.value_type}> first" if is_view else ""


def is_list(kind: pa.DataType) -> bool:
    matches: bool = pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return matches


def is_float_list(kind: pa.DataType) -> bool:
    return is_list(kind) and bool(pa.types.is_floating(kind.value_type))


def is_text(kind: pa.DataType) -> bool:
    matches: bool = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return matches


def fits(role: str, kind: pa.DataType, bfloat16: bool = False) -> bool:
    """Return whether a column of that type can play a role. bfloat16 : the gradient is declared to be that"""
    if role in ("id", "step", "time"):
        return bool(pa.types.is_integer(kind))
    if role == "gradient":
        kind = storage_type(kind)
        return is_list(kind) and bool(kind.value_type == pa.uint16()) if bfloat16 else is_float_list(kind)
    if role == "learning_rates":
        return is_float_list(kind)
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return is_text(kind) or (role == "contributor" and bool(pa.types.is_integer(kind)))


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` if a candidate is close, else nothing."""
    near = nearest(name, candidates)
    return f"; did you mean '{near}'?" if near is not None else ""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the closest candidate; upper and lower case do not count."""
    folded = {other.casefold(): other for other in candidates}
    near = close_names(name.casefold(), folded, cutoff=0.5)
    return folded[near[0]] if near else None
