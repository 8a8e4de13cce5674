"""polars: a group-by. It cannot sum lists elementwise, so the gradient is split into columns; the split is timed."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from penstock.bench.contestants import Way


def ways(threads: int) -> list[Way]:
    """Return the ways. The environment sets the threads: POLARS_MAX_THREADS, before the import."""
    return [Way("polars_group_by", "polars", "coalesce", coalesce, slow=True)]


def coalesce(_: Any, ids: Any, grads: Any) -> tuple[Any, Any]:
    columns = {f"g{j}": np.ascontiguousarray(grads[:, j]) for j in range(grads.shape[1])}
    summed = pl.DataFrame({"id": ids, **columns}).group_by("id").agg(pl.all().sum())
    return summed["id"].to_numpy(), summed.drop("id").to_numpy()
