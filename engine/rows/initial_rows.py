"""The rows that ids have at first, as a value: drawn ones depend only on (seed, table name, id)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.model.frames import Float32
from penstock.pyx.initial_rows import draw


class InitialRows(NamedTuple):
    """The rows that ids have before anything is written to them, and keys without a row.

    kind : "zero"; "constant": ``first``; "row_id": the key plus ``first``; "normal" and "uniform": drawn with
        ``first``, ``second`` and the generator's ``key``, as ``pyx.initial_rows`` does
    """

    kind: str = "zero"
    first: float = 0.0
    second: float = 0.0
    key: str = ""

    def fill(self, keys: npt.NDArray[Any], out: Float32) -> None:
        """Write the rows of keys, of their type, to ``out``: float32 (n, dim)."""
        if self.kind in ("zero", "constant"):
            out.fill(self.first)
        elif self.kind == "row_id":
            out[:] = (keys.astype(np.float64) + self.first)[:, None]
        elif len(keys):
            draw(keys.view(np.int64), bytes.fromhex(self.key), self.kind == "normal", self.first, self.second, out)
