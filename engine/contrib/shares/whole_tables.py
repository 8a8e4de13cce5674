"""The tables of a job whose rows are in shares, as one: streamed, hashed and written, without a copy of a table.

The keys of all shares, which the hash and the files need in one order, are in memory or in mapped files.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.io.table_files import TablesWriter
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.frames import Array, Float32, Int64
from penstock.rows.shares import Share
from penstock.rows.state_hash import KeyArrays, state_hash

_BLOCK_BYTES = 4 << 20
# Of candidates: the younger, the older.
_GENERATIONS = 2


class ShareTables(Protocol):
    """The rows of all tables in one share. ``TableSet`` is one."""

    def rows_in_hash_order(self, name: str) -> tuple[Int64, KeyArrays]: ...

    def read_rows(self, name: str, part: int, rows: Int64) -> Float32: ...


class WholeTables:
    """The tables of all shares. They must not change while they are read.

    shares : by rank
    scratch : a folder for the keys of all shares, in files without names; None: they are in memory
    """

    def __init__(self, config: EmbeddingConfig, shares: Sequence[ShareTables], scratch: Path | None = None) -> None:
        self._specs = {spec.name: spec for spec in config.tables}
        self._mod = config.sharding_strategy == "MOD"
        self._shares, self._scratch = shares, scratch

    def hash(self, global_step: int) -> str:
        """Return what ``Engine.state_hash`` returns for one engine with all rows."""
        return state_hash(self._specs, global_step, self._stream, self._key_arrays)

    def write(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write one Parquet file per table, as ``Engine.write_tables`` does; return their paths."""
        with TablesWriter(Path(directory)) as writer:
            for name, spec in self._specs.items():
                columns = {"row": spec.dim, **spec.slot_dims}
                keys, order = (None, None) if spec.dynamic is None else self._sorted_keys(name)
                blocks = [self._stream(name, part, order) for part in range(len(columns))]
                writer.write(name, columns, zip(*blocks, strict=True), keys)
        return writer.written

    def _stream(self, name: str, part: int, order: Int64 | None = None) -> Iterator[Float32]:
        """Yield rows in blocks. order : positions in the order of the state hash; None: all of them"""
        spec, orders, num_rows = self._specs[name], None, self._specs[name].vocabulary_size
        if spec.dynamic is not None:
            orders = [share.rows_in_hash_order(name)[0] for share in self._shares]
            firsts = np.cumsum([0, *map(len, orders)])
            num_rows = int(firsts[-1])
        whole = Share(0, len(self._shares), spec.vocabulary_size, self._mod)
        at_once = max(1, _BLOCK_BYTES // (4 * spec.dim))
        for first in range(0, num_rows, at_once):
            block = np.arange(first, min(first + at_once, num_rows))
            block = block if order is None else order[block]
            if orders is None:
                ranks, local_rows = whole.locate(block)
            else:
                ranks = np.searchsorted(firsts, block, "right") - 1
                local_rows = block - firsts[ranks]
            values = np.empty((len(block), spec.part_dims[part]), np.float32)
            for rank in np.unique(ranks).tolist():
                of_rank = ranks == rank
                rows = local_rows[of_rank] if orders is None else orders[rank][local_rows[of_rank]]
                values[of_rank] = self._shares[rank].read_rows(name, part, rows)
            yield values

    def _key_arrays(self, name: str) -> KeyArrays:
        """Return those of all shares as one directory has them: virtual shards are in the order of the shares."""
        shares = [share.rows_in_hash_order(name)[1] for share in self._shares]
        arrays = list(zip(*(arrays for arrays, _ in shares), strict=True))
        # The last four are the candidates, in order of generation in each share and among all.
        bounds = [np.searchsorted(generation, range(1 + _GENERATIONS)) for generation in arrays[-1]]
        pieces = [
            (rank, slice(bound[generation], bound[generation + 1]))
            for generation in range(_GENERATIONS)
            for rank, bound in enumerate(bounds)
        ]
        keys = [self._joined(parts) for parts in arrays[:-4]]
        candidates = [self._joined([parts[rank][rows] for rank, rows in pieces]) for parts in arrays[-4:]]
        return [*keys, *candidates], max(clock for _, clock in shares)

    def _sorted_keys(self, name: str) -> tuple[Array, Int64]:
        """Return the keys of all shares, ascending, and the position of each in the order of the state hash."""
        id_type = self._specs[name].id_type
        shares = [share.rows_in_hash_order(name)[1][0][0].view(id_type) for share in self._shares]
        keys = self._joined(shares)
        keys.sort()
        order, first = self._empty(np.int64, len(keys)), 0
        for share in shares:
            ascending = np.argsort(share)
            order[np.searchsorted(keys, share[ascending])] = first + ascending
            first += len(share)
        return keys, order

    def _joined(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts, out=self._empty(parts[0].dtype, sum(map(len, parts))))

    def _empty(self, dtype: npt.DTypeLike, size: int) -> Array:
        return np.empty(size, dtype) if self._scratch is None else mapped_array(dtype, size, self._scratch)


def mapped_array(dtype: npt.DTypeLike, size: int, folder: Path) -> npt.NDArray[Any]:
    """Return an array of zeros in a file of ``folder`` without a name. Raises OSError if the disk has no room."""
    dtype = np.dtype(dtype)
    num_bytes = max(1, size) * dtype.itemsize
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(num_bytes)
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and a SIGBUS when a page is written
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype)[:size]
