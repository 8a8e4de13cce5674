"""The directory in dictionaries and sorts: the definition of ``directory`` and ``directory_plan``, and their oracle.

One opening is one call of ``step``. Rows are not modelled: which of its shard's rows a key gets decides nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache

import numpy as np

MASK = 2**64 - 1
EXPIRED, EVICTED = 0, 1


def philox_key(purpose: bytes, seed: int, table: str) -> bytes:
    """Return 16 bytes that depend on the purpose, the seed and the table."""
    return hashlib.sha256(b"penstock table %s\0%d\0%s" % (purpose, seed, table.encode())).digest()[:16]


@cache
def mixed(key: int, salt: int) -> int:
    """The 64-bit finalizer of SplitMix64 (Steele, Lea and Flood, 2014), a bijection."""
    x = key ^ salt
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


@dataclass(frozen=True)
class Record:
    """A key with a row, or a candidate."""

    last: int
    count: int = 0


@dataclass
class Shard:
    """Keys and candidates of one virtual shard of ``num_rows`` rows."""

    num_rows: int
    keys: dict[int, Record] = field(default_factory=dict)
    young: dict[int, Record] = field(default_factory=dict)
    old: dict[int, Record] = field(default_factory=dict)
    removed: tuple[set[int], set[int]] = (set(), set())  # lately, before
    num_returned: int = 0

    def remove(self, key: int) -> None:
        lately, before = self.removed
        if len(lately) >= self.num_rows:
            lately, before = set(), lately
        self.removed = lately | {key}, before

    def swap(self) -> None:
        self.young, self.old = {}, self.young


@dataclass
class Directory:
    """The keys of one table; arguments as for ``directory.Directory``."""

    capacity: int
    seed: int
    table: str
    min_count: int = 1
    by_frames: bool = False
    probability: float | None = None
    forget_after: int | None = None
    expire_after: int | None = None
    evict: str | None = None
    half_life: int | None = None
    sweep_period: int = 1024

    def __post_init__(self) -> None:
        num_shards = 1
        while 2 * num_shards <= min(1024, self.capacity // 4096):
            num_shards *= 2
        rows, more = divmod(self.capacity, num_shards)
        self.shards = [Shard(rows + (s < more)) for s in range(num_shards)]
        self.salt = int.from_bytes(philox_key(b"keys", self.seed, self.table)[:8], "little")
        self.chance = int.from_bytes(philox_key(b"admission", self.seed, self.table), "little")
        self.epoch = 0

    def mixed(self, key: int) -> int:
        return mixed(key & MASK, self.salt)

    def expired(self, record: Record, clock: int) -> bool:
        return self.expire_after is not None and clock - record.last > self.expire_after

    def score(self, record: Record, clock: int) -> int:
        if self.half_life is None:
            return record.last
        return record.count >> max(0, clock // self.half_life - record.last // self.half_life)

    def admits(self, key: int, rows: int, total: int, step: int) -> bool:
        """Whether a key with so many rows in this step and so many occurrences in all is admitted."""
        if self.probability is None:
            return total >= self.min_count
        counter = (key & MASK) | step << 64
        drawn = int(np.random.Philox(counter=counter, key=self.chance).random_raw())
        refused, base = 1.0, 1 - self.probability
        while rows:
            refused, base, rows = refused * base if rows & 1 else refused, base * base, rows >> 1
        return (drawn >> 11) * 2.0**-53 >= refused

    def step(
        self, keys: list[int], rows: list[int], frames: list[int], clock: int, step: int, admit_all: bool = False
    ) -> tuple[list[int], list[tuple[int, int]], int]:
        """Return the keys admitted, those removed with the reason, and how many were rejected."""
        if self.forget_after and not admit_all:
            for shard in self.shards * max(0, min(2, step // self.forget_after - self.epoch)):
                shard.swap()
            self.epoch = step // self.forget_after
        admitted, removed, rejected = [], [], 0
        dealt: list[dict[int, tuple[int, int]]] = [{} for _ in self.shards]
        for key, num_rows, num_frames in zip(keys, rows, frames, strict=True):
            dealt[self.mixed(key) * len(dealt) >> 64][key] = num_rows, num_frames
        for number, (shard, mine) in enumerate(zip(self.shards, dealt, strict=True)):
            num_removed = len(removed)
            came = {k for k in mine if k in shard.keys and not self.expired(shard.keys[k], clock)}
            wanted, waits = [], {}
            for key, (num_rows, num_frames) in mine.items():
                if key in came:
                    continue
                seen = shard.young.get(key) or shard.old.get(key) or Record(0)
                waits[key] = Record(clock, seen.count + (num_frames if self.by_frames else num_rows))
                if admit_all or self.admits(key, num_rows, waits[key].count, step):
                    wanted.append(key)
            gone = [k for k in shard.keys if self.expired(shard.keys[k], clock)]
            swept = self.sweep_period and step % self.sweep_period == number * self.sweep_period // len(self.shards)
            returned = [k for k in gone if k in mine]
            if (admit_all or not swept) and len(wanted) <= shard.num_rows - len(shard.keys) + len(returned):
                gone = returned
            left = {k: record for k, record in shard.keys.items() if k not in gone}
            removed += [(k, EXPIRED) for k in sorted(gone, key=self.mixed)]
            short = len(wanted) - (shard.num_rows - len(left))
            if short > 0 and self.evict:
                victims = sorted((self.score(r, clock), self.mixed(k), k) for k, r in left.items() if k not in came)
                for _, _, key in victims[: short + shard.num_rows // 16]:
                    removed.append((key, EVICTED))
                    del left[key]
            fits = shard.num_rows - len(left)
            rejected += max(0, len(wanted) - fits)
            wanted = sorted(wanted, key=self.mixed)[:fits]
            for key, _ in removed[num_removed:]:
                shard.remove(key)
            shard.num_returned += sum(key in shard.removed[0] | shard.removed[1] for key in wanted)
            admitted += wanted
            for key in [*came, *wanted]:
                count = self.score(left.get(key, Record(clock)), clock) + mine[key][0] if self.half_life else 0
                left[key] = Record(clock, count)
            shard.keys = left
            for key, record in waits.items():
                if key in left or not admit_all:
                    shard.old.pop(key, None)
                    shard.young.pop(key, None)
                if key not in left and self.probability is None and not admit_all:
                    shard.young[key] = record
            if self.forget_after is None and len(shard.young) >= shard.num_rows and mine.keys() - came:
                shard.swap()
        return admitted, removed, rejected
