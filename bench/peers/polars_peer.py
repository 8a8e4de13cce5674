"""polars: a group-by. It cannot sum lists elementwise, so the gradient is split into columns; the split is timed.

Keys are numbered by a join with the keys so far.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from penstock.bench.contestants import AnyWay, KeyWay, Way


def ways(threads: int) -> list[AnyWay]:
    """Return the ways. The environment sets the threads: POLARS_MAX_THREADS, before the import."""
    return [
        Way("polars_group_by", "polars", "coalesce", coalesce, slow=True),
        KeyWay("polars_join", "polars", lambda _: {"keys": numbered(np.zeros(0, np.int64), 0)}, number_by_join),
    ]


def coalesce(_: Any, ids: Any, grads: Any) -> tuple[Any, Any]:
    columns = {f"g{j}": np.ascontiguousarray(grads[:, j]) for j in range(grads.shape[1])}
    summed = pl.DataFrame({"id": ids, **columns}).group_by("id").agg(pl.all().sum())
    return summed["id"].to_numpy(), summed.drop("id").to_numpy()


def numbered(keys: Any, first: int) -> pl.DataFrame:
    return pl.DataFrame({"key": keys, "row": np.arange(first, first + len(keys))})


def number_by_join(table: dict[str, Any], keys: Any) -> Any:
    rows = pl.DataFrame({"key": keys}).join(table["keys"], on="key", how="left", maintain_order="left")["row"]
    if not rows.null_count():
        return rows.to_numpy()
    first, new = len(table["keys"]), rows.is_null()
    table["keys"] = pl.concat([table["keys"], numbered(keys[new.to_numpy()], first)])
    return pl.select(pl.when(new).then(first - 1 + new.cum_sum().cast(pl.Int64)).otherwise(rows)).to_series().to_numpy()
