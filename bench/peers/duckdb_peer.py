"""DuckDB: a group-by over columns, in double precision; splitting the gradient into columns is timed."""

from __future__ import annotations

from functools import partial
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from penstock.bench.contestants import Way


def ways(threads: int) -> list[Way]:
    connection = duckdb.connect()
    connection.execute(f"SET threads = {int(threads)}")
    return [Way("duckdb_group_by", "duckdb", "coalesce", partial(coalesce, connection), slow=True)]


def coalesce(connection: Any, _: Any, ids: Any, grads: Any) -> tuple[Any, Any]:
    columns = {f"g{j}": np.ascontiguousarray(grads[:, j]) for j in range(grads.shape[1])}
    connection.register("rows", pa.table({"id": ids, **columns}))
    sums = ", ".join(f"sum({name})::FLOAT AS {name}" for name in columns)
    summed = connection.execute(f"SELECT id, {sums} FROM rows GROUP BY id").fetchnumpy()
    return np.asarray(summed["id"]), np.stack([np.asarray(summed[name]) for name in columns], axis=1)
