"""Drives the steps of pyx/update for the sanitizers to watch.

Every rule, target, dim around the vectors' widths, number of rows around a work item's, on one thread and several, on
one device and three; gradients and ids as Arrow hands them over; ids outside the table, steps of nothing, teams whose
threads come late or not at all. The results of one rule must be the same bits however it was run.

--break rows shows that ThreadSanitizer watches: ids that are not distinct, so that two threads update the same rows.
"""

import contextlib
import sys
from functools import partial

import numpy as np
import reference
from sanitize.shapes import arrow_like

from penstock.base.threads import ThreadTeam
from penstock.model.updates.rule import ROW_SLOTS
from penstock.pyx import update
from penstock.pyx.accumulator import targets

# A work item is 1,024 rows; prefetching runs 4 to 32 rows ahead.
SIZES = (0, 1, 5, 33, 1025, 2500, 5000)
DIMS = (1, 3, 4, 7, 8, 15, 16, 17, 33)
NUM_SHARDS, LR = 12, 0.1
NUMBERS = {
    **dict.fromkeys(update.NUMBERS, 0.5),
    "gradient_min": -2.0,
    "gradient_max": 2.0,
    "weight_min": -9.0,
    "weight_max": 9.0,
    "lr_power": -0.75,
}
OUTSIDE = (-1, -(2**63), 2**62, 2**63 - 1)
TEAMS = {threads: ThreadTeam(threads) for threads in (1, 2, 3, 4, 9)}


class Tables:
    """One table as its devices hold it, and what has been asked of it."""

    def __init__(self, rule, dim, rows, devices=1, mod=True, non_lazy=False, threads=1, target="", numbers=NUMBERS):
        self.rows, self.num_parts, self.team = rows, 1 + update.rules()[rule], TEAMS[threads]
        self.per_shard, self.shards = -(-rows // NUM_SHARDS), -(-NUM_SHARDS // devices)
        self.starts = [0.25 + part for part in range(self.num_parts)]
        self.layout = (rows, NUM_SHARDS, mod, self.shards, self.per_shard, devices)
        layout = {"vocabulary_size": rows, "num_shards": NUM_SHARDS, "mod": mod}
        layout |= {"rows_per_shard": self.per_shard, "shards_per_device": self.shards}
        self.rule = update.TableRule(rule, numbers, dim=dim, non_lazy=non_lazy, target=target, **layout)
        self.plan_is_whole = devices == 1 and not mod
        # Each in separate memory: a guarded zone lies behind its last row.
        of_rows = ROW_SLOTS.get(rule, 0)
        self.dims = [dim] * (self.num_parts - of_rows) + [1] * of_rows
        row = np.repeat(self.starts, self.dims).astype(np.float32)
        self.parts = [np.tile(row, (self.shards * self.per_shard, 1)) for _ in range(devices)]
        self.step = update.Step([self.rule], [part.reshape(-1) for part in self.parts])

    def run(self):
        self.step.run(self.team.run, self.team.threads)

    def update(self, segments):
        self.step.update([(0, segments, LR)])
        self.run()

    def read(self, part, ids=0):
        num = self.rows if isinstance(ids, int) else len(ids)
        values = np.empty((num, self.dims[part]), np.float32)
        self.step.copy(0, ids, values, part, False)
        self.run()
        return values

    def bits(self):
        return [self.read(part).tobytes() for part in range(self.num_parts)]

    def by_hand(self, part):
        """The rows in id order, found by partition's arithmetic; they lie in that order where one device has all."""
        first = sum(self.dims[:part])
        floats = slice(first, first + self.dims[part])
        if self.plan_is_whole:
            return self.parts[0][: self.rows, floats]
        devices, rows = reference.place(np.arange(self.rows), *self.layout)
        return np.stack([self.parts[device][row, floats] for device, row in zip(devices, rows, strict=True)])


def main() -> int:
    assert any(word in update.__file__ for word in ("asan", "tsan")), f"not the sanitized build: {update.__file__}"
    if sys.argv[1:] == ["--break", "rows"]:
        return same_rows()
    num = every_rule() + layouts() + outside() + teams() + wrong_arrays()
    assert not {"jax", "pyarrow"} & set(sys.modules)
    print(f"sanitize: {num} steps, nothing reported, results are right")
    return 0


def same_rows() -> int:
    """What ``update`` forbids: the ids of one segment again in the next one."""
    ids, grads = gradients(0, 20_000, 40_000, 16)
    tables = Tables("adagrad", 16, 40_000, threads=4)
    for _ in range(20):
        tables.update([(ids, grads), (ids[::-1].copy(), grads)])
    print("tsan: everything ran, with rows broken")
    return 0


def gradients(seed, num_rows, vocabulary, dim):
    rng = np.random.default_rng(seed)
    ids = rng.permutation(vocabulary)[:num_rows].astype(np.int64)
    return ids, rng.standard_normal((num_rows, dim)).astype(np.float32)


def every_rule():
    """Each rule on each target, lazily and not, in one piece, in pieces and as Arrow lays its arrays out."""
    done = 0
    for number, rule in enumerate(sorted(update.rules())):
        for target in targets():
            for turn, size in enumerate(SIZES):
                dim, non_lazy = DIMS[(number + turn) % len(DIMS)], turn % 2 == 1
                rows = max(40, 2 * size)
                ids, grads = gradients(number, size, rows, dim)
                wanted = Tables(rule, dim, rows, non_lazy=non_lazy, threads=1, target=targets()[-1])
                wanted.update([(ids, grads)])
                assert all(np.isfinite(wanted.read(part)).all() for part in range(wanted.num_parts))
                for piece in zip(arrow_like(ids), arrow_like(grads), strict=False):
                    got = Tables(rule, dim, rows, non_lazy=non_lazy, threads=4, target=target)
                    got.update([piece])
                    assert got.bits() == wanted.bits(), (rule, target, dim, size)
                    done += 1
                half = size // 2
                got = Tables(rule, dim, rows, non_lazy=non_lazy, threads=3, target=target)
                got.update([(ids[:half], grads[:half]), (ids[half:], grads[half:]), (ids[:0], grads[:0])])
                assert got.bits() == wanted.bits(), (rule, target, dim, size)
                done += 1
    return done


def layouts():
    """Devices, strategies and tables of fewer rows than shards: what is written is read, and lies where it should."""
    done = 0
    for rows in (1, 2, 11, 12, 13, 100, 3001):
        for devices in (1, 3, 5):
            for mod in (True, False):
                tables = Tables("adagrad", 7, rows, devices, mod, threads=2)
                values = np.random.default_rng(rows).standard_normal((rows, 7)).astype(np.float32)
                for ids in (0, np.random.default_rng(1).permutation(rows)):
                    for part in range(tables.num_parts):
                        assert (tables.by_hand(part) == tables.starts[part]).all() or not isinstance(ids, int)
                        tables.step.copy(0, ids, values, part, True)
                        tables.run()
                        assert tables.read(part, ids).tobytes() == values.tobytes()
                        assert tables.read(part).tobytes() == tables.by_hand(part).tobytes()
                        done += 3
                ids = np.random.default_rng(3).permutation(rows)[: rows // 2]
                copied = np.full((len(ids), 7 * tables.num_parts), np.nan, np.float32)
                tables.step.copy(0, ids, copied, None, False)
                tables.run()
                for part in range(tables.num_parts):
                    assert copied[:, 7 * part : 7 * part + 7].tobytes() == tables.read(part)[ids].tobytes()
                subset = np.random.default_rng(2).integers(
                    0, rows, 2 * rows
                )  # repeats are fine where nothing is written
                assert tables.read(0, subset).tobytes() == tables.read(0)[subset].tobytes()
    return done


def outside():
    """An id that is no row of the table is an error, and all other rows are updated on every device."""
    done = 0
    for bad in (*OUTSIDE, 100):
        for non_lazy in (False, True):
            for devices in (1, 3):
                ids, grads = gradients(0, 50, 100, 5)
                wanted = Tables("adam", 5, 100, devices, non_lazy=non_lazy, threads=2)
                wanted.update([(ids, grads)])
                got = Tables("adam", 5, 100, devices, non_lazy=non_lazy, threads=2)
                with_bad = np.insert(ids, 25, bad), np.insert(grads, 25, 9.0, axis=0)
                assert "an id outside the table" in error_of(got.update, [with_bad])
                assert got.bits() == wanted.bits()
                done += 2
    return done


def teams():
    """Threads that come when all is done, that do not come, and a team that fails before or after its work."""

    def late(tasks):
        first, *others = tasks
        first()
        for task in others:
            task()
        return True

    def failing(error, tasks):
        tasks[0]()
        raise error

    fails = [partial(failing, error) for error in (KeyboardInterrupt, MemoryError)]
    done = 0
    ids, grads = gradients(0, 9000, 20_000, 4)
    for rule, devices in (("adagrad", 1), ("adam", 3)):
        wanted = Tables(rule, 4, 20_000, devices, non_lazy=True)
        wanted.update([(ids, grads)])
        for run in (TEAMS[2].run, TEAMS[9].run, late, lambda tasks: tasks[0](), lambda tasks: True, *fails):
            for _ in range(3):
                got = Tables(rule, 4, 20_000, devices, non_lazy=True)
                got.step.update([(0, [(ids, grads)], LR)])
                with contextlib.suppress(KeyboardInterrupt):
                    got.step.run(run, 9)
                assert got.bits() == wanted.bits(), run
                done += 1
    return done


def wrong_arrays():
    """Arrays of other sizes are refused, and nothing is touched."""
    tables = Tables("sgd", 4, 50)
    before = tables.bits()
    ids, grads = gradients(0, 20, 50, 5)
    assert "expected rows of 4 floats" in error_of(tables.update, [(ids, grads)])
    assert "rows for as many ids" in error_of(tables.update, [(ids[:9], np.ascontiguousarray(grads[:, :4]))])
    assert "floats for the tables of a device" in error_of(update.Step, [tables.rule], [np.zeros(9, np.float32)])
    assert tables.bits() == before
    return 3


def error_of(call, *arguments):
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
