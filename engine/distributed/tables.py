"""The tables of a job as one of its processes sees them: whole, by name and id, and the rows here in its own share.

What looks at rows (``read``, ``stream``) is in lockstep: every process calls it with the same arguments. What writes
rows takes those that are this process's and leaves the others to theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.config.embedding import EmbeddingConfig
from penstock.config.specs import TableSpec
from penstock.distributed.peers import Peers
from penstock.errors import UsageError
from penstock.frames import Coalesced
from penstock.tables.shares import Share
from penstock.tables.table_set import TableSet

if TYPE_CHECKING:
    import jax

    from penstock.bridge.device_tables import DeviceTable

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

# Rows that cross the network at once when whole tables are looked at, in bytes.
_BLOCK_BYTES = 4 << 20


class _Size(NamedTuple):
    """What is asked of a whole table's layout."""

    vocabulary_size: int
    dim: int
    bfloat16: bool


class SharedTable:
    """One table. The methods are those of ``bridge.tables.DeviceTable``, over the ids of the whole table."""

    def __init__(self, name: str, here: DeviceTable, share: Share, dim: int, peers: Peers) -> None:
        self.here, self.share = here, share
        self.layout = _Size(share.vocabulary_size, dim, here.layout.bfloat16)
        self._name, self._peers = name, peers
        self.only_first = False  # whole tables are for process 0 alone

    @property
    def num_parts(self) -> int:
        return self.here.num_parts

    @property
    def stride(self) -> int:
        return self.here.stride

    @property
    def copies_any_number(self) -> bool:
        return self.here.copies_any_number

    def copy_rows(self, numbers: Int64, out: Float32) -> Callable[[], object]:
        """Of rows by their numbers here: a commit's data file is this process's own."""
        return self.here.copy_rows(numbers, out)

    def write(self, ids: Int64, values: Float32, part: int = 0) -> None:
        places, numbers = self.share.mine(np.ascontiguousarray(ids, np.int64))
        self.here.write(numbers, np.ascontiguousarray(values[places]), part)

    def read(self, ids: Int64, part: int = 0) -> Float32:
        return self._met(f"rows of '{self._name}'", ids, part)

    def stream(self, part: int = 0) -> Iterator[Float32]:
        """One part of the whole table in blocks; where they are for process 0, the others' are empty."""
        rows, dim = self.layout.vocabulary_size, self.layout.dim
        at_once = max(1, _BLOCK_BYTES // (4 * dim))
        for first in range(0, rows, at_once):
            block = self._met(f"'{self._name}' from {first}", np.arange(first, min(first + at_once, rows)), part)
            yield block if self._receives(self._peers.rank) else block[:0]

    def whole(self, part: int = 0) -> jax.Array:
        raise UsageError(
            f"table '{self._name}' is shared by {self._peers.count} processes: use lookup, retrieve_parameters or "
            "write_tables"
        )

    def _receives(self, rank: int) -> bool:
        return rank == 0 or not self.only_first

    def _met(self, what: str, ids: Int64, part: int) -> Float32:
        """Rows of ids, each from its owner."""
        ranks, numbers = self.share.locate(ids)
        places = [np.flatnonzero(ranks == rank) for rank in range(self._peers.count)]
        mine = places[self._peers.rank]
        own = self.here.read(numbers[mine], part) if len(mine) else np.empty((0, self.layout.dim), np.float32)
        sent = [[own.reshape(-1).view(np.uint8).data] if self._receives(r) else [] for r in range(self._peers.count)]
        out = np.empty((len(ids), self.layout.dim), np.float32)
        for rank, message in enumerate(self._peers.exchange(f"{what}, part {part}", sent)):
            if rank == self._peers.rank:
                out[places[rank]] = own
            elif len(message):
                out[places[rank]] = np.frombuffer(message, np.float32).reshape(-1, self.layout.dim)
        return out


class SharedState(TableSet):
    """All tables of a job by name, whole to look at; steps are applied to this process's rows."""

    is_share = True

    def __init__(
        self, config: EmbeddingConfig, mesh: jax.sharding.Mesh | None, seed: int, threads: int, peers: Peers
    ) -> None:
        self._peers = peers
        self.specs = {spec.name: spec for spec in config.tables}
        for name, spec in self.specs.items():
            if spec.dynamic is not None:
                raise UsageError(
                    f"table '{name}' is dynamic, which a job of several processes cannot hold; run one process"
                )
        self._here = TableSet(config, mesh, seed, threads, (peers.rank, peers.count))
        self.owned = {name: share for name, share in self._here.shares.items() if isinstance(share, Share)}
        self.devices = self._here.devices
        self._shared = {
            name: SharedTable(name, self._here.table(name), self.owned[name], spec.dim, peers)
            for name, spec in self.specs.items()
        }
        self._tables = self._shared  # type: ignore[assignment]
        self.dynamic = {}

    def here(self, name: str) -> DeviceTable:
        """This process's rows of a table."""
        return self._here.table(name)

    @property
    def held(self) -> Mapping[str, TableSpec]:
        return self._here.held

    def apply(self, coalesced: Mapping[str, list[Coalesced]], rates: tuple[float, ...], step: int) -> None:
        self._here.apply(coalesced, rates, step)

    def warm(self) -> int:
        return self._here.warm()

    def wait(self) -> None:
        self._here.wait()

    def share_of(self, name: str, sums: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, npt.NDArray[Any]]:
        return self._here.share_of(name, sums)

    def hash(self, global_step: int) -> str:
        with self._for_the_first():
            mine = super().hash(global_step)
        first: str = self._peers.gather("the state hash", mine)[0]
        return first

    def write(self, directory: str | os.PathLike[str]) -> list[Path]:
        with self._for_the_first():
            if self._peers.rank == 0:
                return super().write(directory)
            for table in self._shared.values():
                for _ in zip(*(table.stream(part) for part in range(table.num_parts)), strict=True):
                    pass
        return []

    @contextmanager
    def _for_the_first(self) -> Iterator[None]:
        try:
            for table in self._shared.values():
                table.only_first = True
            yield
        finally:
            for table in self._shared.values():
                table.only_first = False
