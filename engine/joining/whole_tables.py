"""The tables of a job whose rows are in shares, as one: streamed, hashed and written, without a copy of a table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from penstock.config.embedding import EmbeddingConfig
from penstock.frames import Array, Float32, Int64
from penstock.io.storage.table_files import TablesWriter
from penstock.tables.shares import Share
from penstock.tables.state_hash import KeyArrays, state_hash

_BLOCK_BYTES = 4 << 20


class ShareTables(Protocol):
    """The rows of all tables in one share. ``TablesById`` is one."""

    def in_order(self, name: str) -> tuple[Int64, KeyArrays]: ...

    def read_rows(self, name: str, part: int, rows: Int64) -> Float32: ...


class WholeTables:
    """The tables of all shares. They must not change while they are read.

    shares : by rank
    """

    def __init__(self, config: EmbeddingConfig, shares: Sequence[ShareTables]) -> None:
        self._specs = {spec.name: spec for spec in config.tables}
        self._mod = config.sharding_strategy == "MOD"
        self._shares = shares

    def hash(self, global_step: int) -> str:
        """Return what ``Engine.state_hash`` returns for one engine with all rows."""
        return state_hash(self._specs, global_step, self._stream, self._key_arrays)

    def write(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write one Parquet file per table, as ``Engine.write_tables`` does; return their paths."""
        with TablesWriter(Path(directory)) as writer:
            for name, spec in self._specs.items():
                columns = {"row": spec.dim, **dict.fromkeys((slot for slot, _ in spec.slots), spec.slot_dim)}
                keys, order = (None, None) if spec.dynamic is None else self._sorted_keys(name)
                blocks = [self._stream(name, part, order) for part in range(len(columns))]
                writer.write(name, columns, zip(*blocks, strict=True), keys)
        return writer.written

    def _stream(self, name: str, part: int, order: Int64 | None = None) -> Iterator[Float32]:
        """Yield rows in blocks. order : positions in the order of the state hash; None: all of them"""
        spec, count = self._specs[name], len(self._shares)
        if spec.dynamic is None:
            orders = None
            sizes = np.array([Share(spec.vocabulary_size, self._mod, rank, count).num_rows for rank in range(count)])
        else:
            orders = [share.in_order(name)[0] for share in self._shares]
            sizes = np.array([len(rows) for rows in orders])
        at_once = max(1, _BLOCK_BYTES // (4 * spec.dim))
        firsts = np.cumsum(sizes) - sizes
        num_rows = sizes.sum() if order is None else len(order)
        for first in range(0, num_rows, at_once):
            block = (
                np.arange(first, min(first + at_once, num_rows)) if order is None else order[first : first + at_once]
            )
            if self._mod and spec.dynamic is None:
                ranks, places = block % count, block // count
            else:
                ranks = np.searchsorted(firsts, block, "right") - 1
                places = block - firsts[ranks]
            values = np.empty((len(block), spec.slot_dim if part else spec.dim), np.float32)
            for rank in np.unique(ranks).tolist():
                of_rank = ranks == rank
                rows = places[of_rank] if orders is None else orders[rank][places[of_rank]]
                values[of_rank] = self._shares[rank].read_rows(name, part, rows)
            yield values

    def _key_arrays(self, name: str) -> KeyArrays:
        """Return those of all shares as one directory has them: virtual shards are in the order of the shares."""
        found = [share.in_order(name)[1] for share in self._shares]
        joined = [np.concatenate(arrays) for arrays in zip(*(arrays for arrays, _ in found), strict=True)]
        generation = np.argsort(joined[-1], kind="stable")  # the candidates are the last four arrays
        return [*joined[:-4], *(array[generation] for array in joined[-4:])], max(clock for _, clock in found)

    def _sorted_keys(self, name: str) -> tuple[Array, Int64]:
        keys = self._key_arrays(name)[0][0].view(self._specs[name].id_type)
        order: Int64 = np.argsort(keys)
        return keys[order], order
