"""Which rows of a batch are bad, and why.

Two ways judge a row. ``find_bad_rows`` reads every value and gives the reason. The kernel that sums a frame's rows
(``pyx.frame_accumulate``) reads every id and value anyway: it checks the ids' range and that values are finite, and
undoes the frame if one is bad. A run therefore asks ``find_bad_rows`` only if ``may_be_bad`` says so, and after the
kernel has refused a frame. tests/io/decoding/test_row_checks.py holds the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from penstock.base.errors import listed
from penstock.io.decoding.role_types import suggestion
from penstock.io.decoding.rows import RowBatch
from penstock.io.decoding.schema import Roles
from penstock.model.config.id_ranges import expected, key_type_hint, outside
from penstock.model.frames import sum_problem

Sizes = Mapping[str, tuple[int, int]]  # table → (vocabulary_size, dim)

# Why a row is bad; the index is its code, and if several apply, the first one is reported.
REASONS = (
    "",
    "unknown_table",
    "id_null",
    "id_out_of_range",
    "gradient_null",
    "length_mismatch",
    "gradient_not_finite",
    "sum_not_finite",
)
SUM_NOT_FINITE = REASONS.index("sum_not_finite")  # found by summing the rows, not by ``find_bad_rows``


def find_bad_rows(batch: RowBatch, sizes: Sizes) -> npt.NDArray[np.uint8] | None:
    """Return the reason code of every row, or None if all are good."""
    of_tables = [sizes.get(name, (0, -1)) if name is not None else (0, -1) for name in batch.tables]
    if batch.codes is None:
        vocabulary, dim = (np.int64(n) for n in of_tables[0])
    else:
        # The last entry stands for code -1, a null.
        lookup = np.array([*of_tables, (0, -1)], np.int64)
        vocabulary, dim = lookup[batch.codes, 0], lookup[batch.codes, 1]
    causes = {
        "gradient_not_finite": batch.gradients.not_finite(),
        "length_mismatch": batch.gradients.differ_from(dim),
        "gradient_null": batch.gradients.null,
        "id_out_of_range": outside(batch.raw_ids, vocabulary),
        "id_null": batch.ids_null,
        "unknown_table": np.asarray(dim < 0),
    }
    if not any(cause is not None and cause.any() for cause in causes.values()):
        return None
    codes = np.zeros(batch.num_rows, np.uint8)
    for reason, cause in causes.items():  # the strongest last: it overwrites
        if cause is not None:
            codes[np.broadcast_to(cause, codes.shape)] = REASONS.index(reason)
    return codes


def explain(batch: RowBatch, row: int, code: int, sizes: Sizes, roles: Roles) -> tuple[str, str | None]:
    """Explain why a row is bad, as (problem, column name)."""
    reason, table = REASONS[code], batch.table_of(row)
    if reason == "unknown_table":
        return _unknown_table(table, sizes, roles)
    vocabulary, dim = sizes[table or ""]
    if reason == "id_null":
        return "expected an id, got null", roles.id.name
    if reason == "id_out_of_range":
        setting = f"{'vocabulary_size' if vocabulary > 0 else 'key_type'} of table '{table}'"
        got = int(batch.raw_ids[row])
        problem = f"expected {expected(vocabulary)} ({setting}), got {got}"
        return problem + key_type_hint(vocabulary, got), roles.id.name
    gradients, column = batch.gradients, roles.gradient.name
    if code == SUM_NOT_FINITE:
        return sum_problem(table or "", int(batch.raw_ids[row])), column
    if reason == "gradient_null":
        return f"expected {dim} floats, got null", column
    if reason == "length_mismatch":
        return f"expected {dim} floats (dim of table '{table}'), got {gradients.length(row)}", column
    values = gradients.of_row(row)
    position = int(np.flatnonzero(~np.isfinite(values))[0])
    return f"expected values that are finite as float32, got {values[position]} at position {position}", column


def _unknown_table(table: str | None, sizes: Sizes, roles: Roles) -> tuple[str, str | None]:
    near = suggestion(table, sizes) if table is not None else ""
    got = "null" if table is None else f"'{table}'"
    problem = f"expected a table of the configuration ({listed(sizes)}), got {got}"
    if roles.table is None:
        return f"{problem} from the schema's metadata, penstock.table{near}", None
    return problem + near, roles.table.name
