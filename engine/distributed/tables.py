"""The tables of a job as one of its processes sees them: whole, by name and id, and the rows here in its own share.

What looks at rows (``read``, ``stream``) is in lockstep: every process calls it with the same arguments. What writes
rows takes those that are this process's and leaves the others to theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.config.embedding import EmbeddingConfig
from penstock.config.specs import TableSpec
from penstock.distributed.peers import Peers
from penstock.distributed.shares import Share
from penstock.errors import UsageError
from penstock.frames import Coalesced
from penstock.tables.initializers import start_of
from penstock.tables.table_keys import TableKeys
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
    def part_dims(self) -> tuple[int, ...]:
        return self.here.part_dims

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
        rows = self.layout.vocabulary_size
        at_once = max(1, _BLOCK_BYTES // (4 * self.layout.dim))
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
        dim = self.part_dims[part]
        own = self.here.read(numbers[mine], part) if len(mine) else np.empty((0, dim), np.float32)
        sent = [[own.reshape(-1).view(np.uint8).data] if self._receives(r) else [] for r in range(self._peers.count)]
        out = np.empty((len(ids), dim), np.float32)
        for rank, message in enumerate(self._peers.exchange(f"{what}, part {part}", sent)):
            if rank == self._peers.rank:
                out[places[rank]] = own
            elif len(message):
                out[places[rank]] = np.frombuffer(message, np.float32).reshape(-1, dim)
        return out


class _Here(TableSet):
    """This process's rows: tables of the sizes of its shares, which start as those rows of the whole tables do."""

    def __init__(
        self,
        config: EmbeddingConfig,
        shares: Mapping[str, Share],
        mesh: jax.sharding.Mesh | None,
        seed: int,
        threads: int,
    ) -> None:
        self._shares, self._wholes = shares, {spec.name: spec for spec in config.tables}
        held = _Held(tuple(replace(s, vocabulary_size=shares[s.name].held_rows) for s in config.tables), config)
        super().__init__(held, mesh, seed, threads)

    def start_of(self, spec: TableSpec, seed: int) -> Callable[[int, int], Float32]:
        return self._shares[spec.name].drawn(start_of(self._wholes[spec.name], seed))

    def among(self, name: str) -> tuple[int, int]:
        share = self._shares[name]
        return share.ids(0), share.stride


class _Held(NamedTuple):
    """What TableSet asks of a configuration."""

    tables: tuple[TableSpec, ...]
    whole: EmbeddingConfig

    @property
    def sharding_strategy(self) -> str:
        return self.whole.sharding_strategy


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
        mod = config.sharding_strategy == "MOD"
        self.shares = {n: Share(s.vocabulary_size, mod, peers.rank, peers.count) for n, s in self.specs.items()}
        self._here = _Here(config, self.shares, mesh, seed, threads)
        self.devices = self._here.devices
        self._shared = {
            name: SharedTable(name, self._here.table(name), self.shares[name], spec.dim, peers)
            for name, spec in self.specs.items()
        }
        self._tables = self._shared  # type: ignore[assignment]
        self.dynamic = TableKeys()

    def here(self, name: str) -> DeviceTable:
        """This process's rows of a table."""
        return self._here.table(name)

    @property
    def held(self) -> Mapping[str, TableSpec]:
        return self._here.specs

    def apply(self, coalesced: Mapping[str, list[Coalesced]], rates: tuple[float, ...], step: int) -> None:
        self._here.apply(coalesced, rates, step)

    def warm(self) -> int:
        return self._here.warm()

    def wait(self) -> None:
        self._here.wait()

    def share_of(self, name: str, sums: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, npt.NDArray[Any]]:
        """Of several frames, also those that have no row here; of sums, none where there are none."""
        mine: dict[str, npt.NDArray[Any]] = {}
        for number in {key.partition(".")[0] for key in sums}:
            ids = sums[f"{number}.ids"]
            places, numbers = self.shares[name].mine(np.ascontiguousarray(ids))
            if len(places) or not self.specs[name].accumulate:
                of_frame = {key: array for key, array in sums.items() if key.startswith(f"{number}.")}
                mine |= {key: array[places] for key, array in of_frame.items()} | {f"{number}.ids": numbers}
        return mine

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
                for _ in zip(*(table.stream(part) for part in range(len(table.part_dims))), strict=True):
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
