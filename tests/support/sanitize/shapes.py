"""Feeds the kernels what Arrow hands over: read-only, 4 or 8 bytes off alignment, slices, no rows, one row, and growth
to just below, at and above every limit. For the sanitizers to watch (asan.sh); results are compared with NumPy too.

Only what is public is used, so that the kernels may change behind it. Neither jax nor pyarrow is loaded.
"""

import itertools
import sys

import numpy as np
import reference
from accumulate import add, drain, is_valid

import penstock as ps
from penstock.pyx import accumulator
from penstock.pyx.accumulator import Accumulator
from penstock.pyx.id_table import IdTable
from penstock.pyx.partition import destinations, lay, locate

DIMS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 128)
SIZES = sorted({0, 1, 2, 3, *(near for power in range(2, 15) for near in (2**power - 1, 2**power, 2**power + 1))})
LOADS = sorted({n + d for power in range(4, 13) for n in (2**power // 2, 2**power * 3 // 4) for d in (-1, 0, 1)})


def main() -> int:
    assert "asan" in accumulator.__file__, f"not the sanitized build: {accumulator.__file__}"
    num = sum(map(sum, (sums(), frames(), tables(), partitions())))
    assert not {"jax", "pyarrow"} & set(sys.modules)
    print(f"sanitize: {num} shapes, nothing reported, results are right")
    return 0


def arrow_like(array):
    """The same values as Arrow lays them out: off alignment as far as their type allows (an address of 4 or 8 modulo
    64), at the very end of a block, read-only; and as a slice of a larger block."""
    array = np.ascontiguousarray(array)
    raw = np.empty(array.nbytes + 72, np.uint8)
    start = (array.itemsize - raw.ctypes.data) % 64
    exact = np.empty(start + array.nbytes, np.uint8)  # nothing behind it but the guarded zone
    start = (array.itemsize - exact.ctypes.data) % 64
    blocks = [raw[(array.itemsize - raw.ctypes.data) % 64 :][: array.nbytes]]
    if start + array.nbytes <= len(exact):
        blocks.append(exact[len(exact) - array.nbytes :] if array.itemsize == 1 else exact[start:][: array.nbytes])
    for block in blocks:
        block[:] = array.reshape(-1).view(np.uint8)
        view = block.view(array.dtype).reshape(array.shape)
        view.flags.writeable = False
        yield view
    around = np.concatenate([array[:1], array, array[:1]])
    yield around[1 : 1 + len(array)] if len(array) else array


def sums():
    """Accumulators, of every dim and size."""
    rng = np.random.default_rng(0)
    for number, size in enumerate(SIZES + LOADS):
        dim = DIMS[number % len(DIMS)]
        dtype = ("float32", "float64")[number % 2]
        ids = rng.integers(0, max(1, size), size)
        grads = rng.standard_normal((size, dim)).astype(dtype)
        for some_ids, some_grads in zip(arrow_like(ids), arrow_like(grads), strict=False):
            acc = ps.SparseConditionalAccumulator(dtype, (max(1, size), dim), "SUM")
            acc.apply_gradient(some_ids, some_grads, local_step=0)
            acc.apply_gradient(some_ids, some_grads, local_step=0)
            state = acc.get_state()
            acc.set_state(state)
            taken = acc.take_gradient(2)
            wanted = np.zeros((max(1, size), dim))
            np.add.at(wanted, ids, 2.0 * grads)
            np.testing.assert_allclose(taken.values, wanted[taken.indices], rtol=2e-4, atol=1e-4)
            yield 1


def frames():
    """Frames in parts as the engine adds them: every dim of 1 to 130, ids hashed, mapped and hashed with a known
    vocabulary, rows picked from others, rows multiplied, blocks of no row and of one; some taken back, some looked
    through first."""
    rng = np.random.default_rng(2)
    combinations = itertools.product(range(1, 131), (None, 700, 2**30))
    for number, (dim, vocabulary) in enumerate(combinations):
        parts, size = (1, 2, 4)[number % 3], (0, 1, 2, 63, 300, 1023, 1024, 1025)[number % 8]
        dtype = (np.float32, np.float64)[number % 5 == 0]
        added = Accumulator(dim, dtype, vocabulary_size=vocabulary)
        ids = rng.integers(0, 700, size) * (2**30 // 700 if vocabulary == 2**30 else 1)
        grads = rng.standard_normal((size, dim)).astype(dtype)
        which, gains = rng.permutation(size), rng.standard_normal(size).astype(np.float32)
        gained = dtype == np.float32
        wanted = []
        for frame, (some_ids, some_grads, rows, some_gains) in enumerate(
            zip(arrow_like(ids), arrow_like(grads), arrow_like(which), arrow_like(gains), strict=False)
        ):
            blocks = [(some_ids, some_grads, None), (some_ids[:1], some_grads[-1:], None), (some_ids, some_grads, rows)]
            blocks += [(some_ids, some_grads, rows, some_gains), (some_ids, some_grads, None, some_gains)] * gained
            if frame == 0:
                taken_back(added, some_ids, some_grads, parts)
            rows_by_hand = [
                grads,
                grads[-1:],
                grads[which],
                *[item * gains[:, None] for item in (grads[which], grads)] * gained,
            ]
            wanted += [(np.concatenate([ids, ids[:1], *[ids] * (1 + 2 * gained)]), np.concatenate(rows_by_hand))]
            assert is_valid(added, blocks, frame, parts)
            assert add(added, blocks, frame, parts)
            yield 1
        added.set_state(added.get_state())
        for got, twin in zip(drain(added, ascending=True), reference.coalesce(wanted, dim, False, dtype), strict=False):
            assert got.tobytes() == twin[np.argsort(ids_of(wanted))].tobytes()


def taken_back(added, ids, grads, parts):
    """A frame that ends with a value that is not finite leaves nothing."""
    bad = grads.copy()
    bad[-1:, -1:] = np.inf
    assert add(added, [(ids, bad)], 0, parts) == (not len(ids))
    assert len(added) == added.num_distinct == 0


def ids_of(frames):
    """Distinct ids in order of first appearance."""
    return np.array(list(dict.fromkeys(int(i) for ids, _ in frames for i in ids)), np.int64)


def tables():
    """Id tables that grow by one id at a time across their load limits, and at once."""
    for size in LOADS:
        ids = np.random.default_rng(size).permutation(size) * 7919 - size
        for group in arrow_like(ids.astype(np.int64)):
            table = IdTable()
            assert (table.insert(group) == np.arange(size)).all()
            assert (table.insert(group) == np.arange(size)).all()
            yield 1
    table = IdTable()
    for number in range(4000):
        assert table.insert(np.array([number * 2**40], np.int64))[0] == number
    yield 1


def partitions():
    """Rows to shards and owners, and their bits to lines."""
    rng = np.random.default_rng(1)
    for size in [s for s in SIZES if s <= 2**12 + 1]:
        vocabulary, dim = max(1, 3 * size), 1 + size % 9
        ids = rng.permutation(vocabulary)[:size].astype(np.int64)
        for mod in (True, False):
            for group in arrow_like(ids):
                for got, wanted in zip(
                    locate(group, vocabulary, 1024, mod), reference.locate(ids, vocabulary, 1024, mod), strict=True
                ):
                    assert (got == wanted).all()
                rows_per_shard = -(-vocabulary // 1024)
                owners, rows, counts = np.empty(size, np.int32), np.empty(size, np.int32), np.zeros(3, np.int64)
                destinations(group, vocabulary, 1024, mod, 342, rows_per_shard, 1, 0, owners, rows, None, counts)
                assert len(np.unique(owners.astype(np.int64) << 32 | rows)) == size
                grads = rng.standard_normal((size, dim)).astype(np.float32)
                for some_grads in arrow_like(grads):
                    words, cells = np.empty((1, size, dim), np.int32), np.arange(size, dtype=np.int32)
                    lay(cells * 0, cells, 0, some_grads, words)
                    assert (words[0] == grads.view(np.int32)).all()
                    yield 1


if __name__ == "__main__":
    sys.exit(main())
