"""The directory in dictionaries and sorts: the definition of ``directory`` and ``directory_plan``, and their oracle.

One opening is one call of ``step``. Rows are not modelled: which of its shard's rows a key gets decides nothing.
"""

import hashlib
from collections import namedtuple
from functools import cache

import numpy as np

Record = namedtuple("Record", ["last", "count"])  # of a key with a row, or of a candidate
MASK = 2**64 - 1
EXPIRED, EVICTED = 0, 1


def philox_key(purpose, seed, table):
    """The key that decides about keys of a table."""
    text = b"penstock table %s\0%d\0%s" % (purpose, seed, table.encode())
    return int.from_bytes(hashlib.sha256(text).digest()[:16], "little")


@cache
def mixed(key, salt):
    """The 64-bit finalizer of SplitMix64 (Steele, Lea and Flood, 2014), a bijection."""
    x = key & MASK ^ salt
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


class Shard:
    """Keys and candidates of one virtual shard of ``num_rows`` rows."""

    def __init__(self, num_rows):
        self.num_rows, self.keys, self.young, self.old = num_rows, {}, {}, {}

    def swap(self):
        self.young, self.old = {}, self.young


class Directory:
    """The keys of one table; arguments as for ``directory.Directory``."""

    min_count, by_frames, sweep_period, epoch = 1, False, 1024, 0
    probability = forget_after = expire_after = evict = half_life = None

    def __init__(self, capacity, seed, table, **policy):
        vars(self).update(policy)
        num_shards = max([1], [2**n for n in range(1, 11) if capacity >> n >= 4096])[-1]
        self.shards = [Shard((capacity + num_shards - 1 - s) // num_shards) for s in range(num_shards)]
        self.salt = philox_key(b"keys", seed, table) & MASK
        self.chance = philox_key(b"admission", seed, table)

    def mixed(self, key):
        return mixed(key, self.salt)

    def expired(self, record, clock):
        return self.expire_after is not None and clock - record.last > self.expire_after

    def score(self, record, clock):
        """What eviction is decided by: for LFU the count, halved at every multiple of the half-life since ``last``."""
        if self.half_life is None:
            return record.last
        return record.count >> max(0, clock // self.half_life - record.last // self.half_life)

    def admits(self, key, rows, total, step):
        """Whether a key with so many rows in this step and so many occurrences in all is admitted."""
        if self.probability is None:
            return total >= self.min_count
        drawn = np.random.Philox(counter=(key & MASK) | step << 64, key=self.chance).random_raw()
        refused, base = 1.0, 1 - self.probability  # (1 - p) ** rows by squaring, so that every machine rounds alike
        while rows:
            refused, base, rows = refused * base if rows & 1 else refused, base * base, rows >> 1
        return (int(drawn) >> 11) * 2.0**-53 >= refused

    def step(self, keys, rows, frames, clock, step, admit_all=False):
        """Return the keys admitted, those removed with the reason, and how many were rejected."""
        if self.forget_after and not admit_all:
            for shard in self.shards * max(0, min(2, step // self.forget_after - self.epoch)):
                shard.swap()
            self.epoch = step // self.forget_after
        dealt, admitted, removed, rejected = [{} for _ in self.shards], [], [], 0
        for key, *counts in zip(keys, rows, frames, strict=True):
            dealt[self.mixed(key) * len(dealt) >> 64][key] = counts
        for number, (shard, shard_keys) in enumerate(zip(self.shards, dealt, strict=True)):
            came = {k for k in shard_keys if k in shard.keys and not self.expired(shard.keys[k], clock)}
            waits = {k: shard.young.get(k) or shard.old.get(k) or Record(0, 0) for k in shard_keys.keys() - came}
            waits = {k: Record(clock, record.count + shard_keys[k][self.by_frames]) for k, record in waits.items()}
            wanted = [k for k in waits if admit_all or self.admits(k, shard_keys[k][0], waits[k].count, step)]
            gone = {k for k, record in shard.keys.items() if self.expired(record, clock)}
            swept = self.sweep_period and step % self.sweep_period == number * self.sweep_period // len(self.shards)
            returned = gone & shard_keys.keys()
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
            admitted += wanted
            for key in [*came, *wanted]:
                count = self.score(left.get(key, Record(clock, 0)), clock) + shard_keys[key][0] if self.half_life else 0
                left[key] = Record(clock, count)
            shard.keys = left
            for key, record in waits.items():
                if key in left or not admit_all:
                    shard.old.pop(key, None)
                    shard.young.pop(key, None)
                if key not in left and self.probability is None and not admit_all:
                    shard.young[key] = record
            if self.forget_after is None and len(shard.young) >= shard.num_rows and waits:
                shard.swap()
        return admitted, removed, rejected
