"""The kernels in NumPy and plain Python: their definition and the oracle of their tests.

Readable, not fast. Every kernel agrees with its twin here bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.pyx.initial_rows import philox_key
from penstock.pyx.partition import BEGINS

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]


def table_runs(
    codes: npt.NDArray[Any], bounds: list[int], num_values: int, dims: list[int], max_runs: int
) -> list[tuple[int, int, int, int]] | None:
    """Return the runs of rows of one table as (start, stop, code, first value): the twin of ``CodedRows.table_runs``.

    bounds : row i has the values from bounds[i] to bounds[i + 1] - 1, of ``num_values``
    """
    runs: list[tuple[int, int, int, int]] = []
    for row, code in enumerate(codes.tolist()):
        if not 0 <= code < len(dims) or dims[code] < 1 or bounds[row + 1] - bounds[row] != dims[code]:
            return None
        if not 0 <= bounds[row] <= bounds[row + 1] <= num_values:
            return None
        if runs and runs[-1][2] == code:
            runs[-1] = (runs[-1][0], row + 1, code, runs[-1][3])
        else:
            runs.append((row, row + 1, code, bounds[row]))
    return runs if len(runs) <= max_runs else None


def row_squares(rows: Float32) -> npt.NDArray[np.float64]:
    """Return the sum of squares of every row, of eight sums that are added in pairs. Twin of ``norms.row_squares``."""
    wide = rows.astype(np.float64)
    sums = np.zeros((len(rows), 8))
    for element in range(rows.shape[1]):
        sums[:, element % 8] += wide[:, element] ** 2
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums[:, 0]


def clipped_rows(rows: Float32, most: float, epsilon: float) -> Float32:
    """Return rows with those scaled down whose norm exceeds ``most``. Twin of ``norms.clip_rows``."""
    norms = np.sqrt(row_squares(rows))
    scales = np.where(norms > most, most / (norms + epsilon), 1.0).astype(np.float32)
    return rows * scales[:, None]


def index(ids: Int64) -> Int64:
    """Return dense indices in order of first appearance: the twin of ``IdTable.insert`` on an empty table."""
    seen: dict[int, int] = {}
    return np.array([seen.setdefault(i, len(seen)) for i in ids.tolist()], np.int64)


def coalesce(
    frames: Iterable[tuple[Int64, Any]], dim: int, mean: bool = False, dtype: npt.DTypeLike = np.float32
) -> tuple[Int64, Any, Int64]:
    """Sum the rows that share an id: one left fold in dtype, in arrival order, from a copy of the first.

    frames : (ids int64 (n,), grads (n, dim) of dtype) in arrival order; dtype : float32 or float64
    mean : divide each row by dtype(its count)
    Returns ids (u,), sums (u, dim) and counts (u,), the number of frames with the id, in order of first appearance.
    Twin of ``Accumulator``.
    """
    sums: dict[int, Any] = {}
    counts: dict[int, int] = {}
    for ids, grads in frames:
        for i, row in zip(ids.tolist(), grads, strict=True):
            sums[i] = sums[i] + row if i in sums else row.copy()
        for i in set(ids.tolist()):
            counts[i] = counts.get(i, 0) + 1
    rows = [sums[i] / np.dtype(dtype).type(counts[i]) if mean else sums[i] for i in sums]
    return (
        np.array(list(sums), np.int64),
        np.array(rows, dtype).reshape(len(rows), dim),
        np.array([counts[i] for i in sums], np.int64),
    )


def split_rows(ids: Int64, num_parts: int) -> tuple[Int64, Int64, Int64]:
    """Return ids and rows by the part that owns the id, in order, and where each part ends: twin of ``split_rows``."""
    blocks = ids.view(np.uint64) >> np.uint64(9)  # 512 neighbours are of one part
    mixed = (blocks ^ blocks >> np.uint64(32)).astype(np.uint32) * np.uint32(0x9E3779B1)
    parts = mixed >> np.uint32(32 - num_parts.bit_length() + 1)
    rows = np.argsort(parts, kind="stable")
    return ids[rows], rows, np.cumsum(np.bincount(parts, minlength=num_parts))


def overflowing_rows(sums: dict[int, Any], ids: Int64, grads: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Twin of ``overflows.overflows_of``: add rows to the sums of their ids but for those that make one infinite."""
    refused = np.zeros(len(ids), np.bool_)
    for row, row_id in enumerate(ids.tolist()):
        with np.errstate(over="ignore", invalid="ignore"):
            total = sums[row_id] + grads[row] if row_id in sums else grads[row]
        refused[row] = not np.isfinite(total).all()
        if not refused[row]:
            sums[row_id] = total
    return refused


def shard_sizes(vocabulary_size: int, num_shards: int) -> Int64:
    """Return the number of rows of every shard, the same for MOD and DIV (tpu_embedding_shape_util.cc)."""
    quotient, remainder = divmod(vocabulary_size, num_shards)
    return np.array([quotient + (i < remainder) for i in range(num_shards)], np.int64)


def locate(ids: Int64, vocabulary_size: int, num_shards: int, mod: bool) -> tuple[Int64, Int64]:
    """Return the shard of every id and its row there, looked up in the list of ids that each shard owns."""
    if mod:
        owned = [np.arange(shard, vocabulary_size, num_shards) for shard in range(num_shards)]
    else:
        ends = np.cumsum(shard_sizes(vocabulary_size, num_shards))
        owned = np.split(np.arange(vocabulary_size), ends[:-1])
    shards, rows = np.empty(vocabulary_size, np.int64), np.empty(vocabulary_size, np.int64)
    for shard, its_ids in enumerate(owned):
        shards[its_ids], rows[its_ids] = shard, np.arange(len(its_ids))
    return shards[ids], rows[ids]


def place(
    ids: Int64,
    vocabulary_size: int,
    num_shards: int,
    mod: bool,
    shards_per_owner: int,
    rows_per_shard: int,
    num_owners: int,
) -> tuple[Int32, Int32]:
    """Return the owner of every id, and its row there."""
    shards, rows = locate(ids, vocabulary_size, num_shards, mod)
    owners = shards // shards_per_owner
    rows = (shards % shards_per_owner) * rows_per_shard + rows
    return owners.astype(np.int32), rows.astype(np.int32)


def scatter(owners: Int64, numbers: Int64, grads: Float32, counts: Int64, num_owners: int) -> list[tuple[Any, ...]]:
    """Return the numbers, gradients and counts of every owner's rows, in their order."""
    return [(numbers[owners == o], grads[owners == o], counts[owners == o]) for o in range(num_owners)]


def number(rows: Int32, lines: Int32) -> tuple[Int32, Int32]:
    """Return each row's line by number, and the lines by first appearance."""
    distinct, firsts, inverse = np.unique(lines[rows], return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank[inverse], distinct[order].astype(np.int32)


def order(devices: Int32, num_devices: int) -> tuple[Int32, Int32]:
    """Return the number of each row among those of its device, and the rows by device."""
    entries = np.argsort(devices, kind="stable").astype(np.int32)
    counts = np.bincount(devices, minlength=num_devices)
    cells = np.empty(len(devices), np.int32)
    cells[entries] = np.arange(len(devices)) - np.repeat(np.cumsum(counts) - counts, counts)
    return cells, entries


def group(numbers: Int32, places: Int32, size: int) -> tuple[Int32, UInt8]:
    """Return the cell of each row, those of a line together, and the marks of all cells."""
    cells = np.argsort(np.argsort(numbers, kind="stable")).astype(np.int32)
    marks = np.full(size, BEGINS, np.uint8)
    marks[cells] = places
    marks[cells[np.unique(numbers, return_index=True)[1]]] |= BEGINS
    return cells, marks


def lay(
    devices: Int32, cells: Int32, first_cell: int, values: Float32, words: Int32, offsets: Int32, lines: Int32
) -> tuple[Int32, Int32]:
    """Return words with rows in their cells, and the line of each cell; other words and lines are −1.

    words : int32 (devices, cells, words), only for its shape; offsets : int32 (n,), of each row in its cell
    """
    words, out_lines = np.full(words.shape, -1, np.int32), np.full(words.shape[:2], -1, np.int32)
    for device, cell, row, offset, line in zip(devices, cells - first_cell, values, offsets, lines, strict=True):
        if 0 <= cell < words.shape[1]:
            words[device, cell, offset : offset + len(row)] = row.view(np.int32)
            out_lines[device, cell] = line
    return words, out_lines


def lines_of_words(
    members: Iterable[tuple[Any, Any, int, Int64, Float32]], blank: int, width: int
) -> dict[tuple[int, int], Int32]:
    """Return the words of each (device, line). members : the layout of a table, the format of its lines, its first
    line, distinct ids and their rows"""
    words: dict[tuple[int, int], Int32] = {}
    for layout, line, first_line, ids, grads in members:
        devices, rows = layout.locate(ids)
        for device, row, offset, grad in zip(devices, rows, line.offsets(rows), grads, strict=True):
            key = int(device), first_line + int(row) // line.group
            of_line = words.setdefault(key, np.full(width, blank, np.int32))
            of_line[offset : offset + len(grad)] = grad.view(np.int32)
    return words


def gains(samples: Int64, weights: Float32, num_samples: int, combiner: str) -> Float32:
    """Return weight times the scale of its sample for every lookup: the twin of ``activations.combiners.gains``."""
    first, zero = np.float32(1), np.float32(0)
    totals = [zero] * num_samples
    for sample, weight in zip(samples.tolist(), weights, strict=True):
        totals[sample] += weight if combiner == "mean" else weight * weight
    if combiner == "sum":
        return weights.copy()
    divisors = totals if combiner == "mean" else [np.sqrt(total) for total in totals]
    with np.errstate(over="ignore"):
        scales = [zero if total == 0 else first / by for total, by in zip(totals, divisors, strict=True)]
    pairs = zip(samples.tolist(), weights, strict=True)
    return np.array([w * scales[s] if np.isfinite(scales[s]) else w / divisors[s] for s, w in pairs], np.float32)


def combine(rows: Float32, samples: Int64, by: Float32, num_samples: int) -> Float32:
    """Return activations, summed one looked-up row after the other: the twin of ``row_sums.combine``."""
    out = np.zeros((num_samples, rows.shape[1]), np.float32)
    for row, sample, gain in zip(rows, samples.tolist(), by, strict=True):
        out[sample] = out[sample] + row * gain
    return out


def row_gradients(gradients: Float32, samples: Int64, by: Float32) -> Float32:
    """Return the gradient of every lookup: one product, rounded to float32. Shape (len(samples), dim)."""
    results = [gradients[sample] * gain for sample, gain in zip(samples.tolist(), by, strict=True)]
    return np.array(results, np.float32).reshape(len(samples), gradients.shape[1])


def change_marks(marks: UInt8, ids: Int64) -> tuple[UInt8, Int64]:
    """Return the marks after rows have changed, and the changed ids that waited. Twin of ``dirty_bits.change``."""
    after = marks.copy()
    after[ids] = 1
    return after, ids[(marks[ids] & 2) != 0]


def take_marked(marks: UInt8, cursor: int, stride: int, most: int) -> tuple[UInt8, Int64]:
    """Return the marks after the next waiting rows were taken, and these rows. Twin of ``dirty_bits.take``.

    cursor : the row to begin at, in the order of the strides; rows before it are skipped
    """
    order = np.array([row for first in range(stride) for row in range(first, len(marks), stride)], np.int64)
    begin = int(np.flatnonzero(order == cursor)[0]) if cursor < len(marks) else len(marks)
    taken = order[begin:][(marks[order[begin:]] & 2) != 0][:most]
    after = marks.copy()
    after[taken] &= 1
    return after, taken


def coalesce_expanded(
    frames: Iterable[tuple[Int64, Float32, Int64, Float32]], dim: int, mean: bool = False
) -> tuple[Int64, Any, Int64]:
    """Materialize the gradients of all lookups, then ``coalesce``: the twin of ``Accumulator`` for rows with gains.

    frames : (ids (n,), gradients (num_samples, dim), samples (n,), gains (n,)) in arrival order
    """
    written = ((ids, row_gradients(gradients, samples, by)) for ids, gradients, samples, by in frames)
    return coalesce(written, dim, mean)


class FrameSteps:
    """Twin of ``frame_steps.FrameSteps`` for SGD: one frame after the other, in dicts.

    step, num_accumulated : of the gate; table : float32 (vocabulary_size, dim), updated in place
    """

    def __init__(self, table: Float32, num_required: int, mean: bool) -> None:
        self.table, self.num_required, self.mean = table, num_required, mean
        self.step = self.num_accumulated = 0
        self.sums: dict[int, Float32] = {}
        self.largest = 0.0  # magnitude of a sum since nothing was held
        self.frames: dict[int, int] = {}  # in which an id of the sums occurred
        self.ids: list[int] = []

    def take(
        self,
        ids: Int64,
        grads: Float32,
        bounds: Int64,
        steps: Int64 | None,
        first: int,
        most_frames: int,
        most_steps: int,
        most_changes: int,
        rate: float,
    ) -> int:
        num_taken = num_steps = 0
        self.ids = []
        for number in range(first, min(len(bounds) - 1, first + most_frames)):
            rows = range(bounds[number], bounds[number + 1])
            opens = self.num_accumulated + 1 >= self.num_required
            is_stale = steps is not None and steps[number] < self.step
            sums, partial_sums, largest = dict(self.sums), dict(self.sums), self.largest
            is_bad = not np.isfinite(grads[rows]).all() or not all(0 <= ids[row] < len(self.table) for row in rows)
            is_bad = is_bad or bool(overflowing_rows(sums, ids[rows], grads[rows]).any())
            with np.errstate(over="ignore", invalid="ignore"):
                for row in rows:
                    partial = partial_sums.get(int(ids[row]), np.float32(-0.0)) + grads[row]
                    partial_sums[int(ids[row])] = partial
                    largest = max(largest, float(np.abs(partial).max()))
            # Whether a sum may become infinite: exact only where nothing is held.
            most = (float(np.finfo(np.float32).max) / 2 - self.largest) / (2 * len(rows))
            is_bad = is_bad or (bool(self.sums) and float(np.abs(grads[rows]).max()) > most)
            if is_stale or is_bad or num_steps == most_steps or len(self.ids) >= most_changes:
                break
            self.sums, self.largest = sums, largest
            for row_id in {int(ids[row]) for row in rows}:
                self.frames[row_id] = self.frames.get(row_id, 0) + 1
            self.num_accumulated += 1
            num_taken += 1
            if opens:
                for row_id, total in self.sums.items():
                    mean = total / np.float32(self.frames[row_id]) if self.mean else total
                    with np.errstate(over="ignore"):  # a row may become infinite, as in the kernel
                        self.table[row_id] -= np.float32(rate) * mean
                self.ids += list(self.sums)
                self.sums, self.frames, self.num_accumulated, self.largest = {}, {}, 0, 0.0
                self.step += 1
                num_steps += 1
        return num_taken


# ---- initial rows

_HALF_WIDTH = 0.4772498680518208
_P = (
    2.506628277481258,
    -30.74622382801368,
    139.1492294923544,
    -278.5147114114572,
    224.03642817156643,
    -40.52895479889411,
)
_Q = (
    1.0,
    -13.313165719867957,
    67.1510818369637,
    -157.02215052762983,
    163.6011732862739,
    -55.4425703360281,
)


def truncated_normal(seed: int, table: str, first: int, count: int, dim: int, mean: float, stddev: float) -> Float32:
    """Rows ``first`` to ``first + count`` of a table: a truncated normal. Twin of ``initial_rows.draw``."""
    return (_quantile(_uniform(seed, table, first, count, dim)) * stddev + mean).astype(np.float32)


def uniform(seed: int, table: str, first: int, count: int, dim: int, low: float, high: float) -> Float32:
    """The same rows, drawn uniformly from [low, high)."""
    return (low + (high - low) * _uniform(seed, table, first, count, dim)).astype(np.float32)


def _uniform(seed: int, table: str, first: int, count: int, dim: int) -> npt.NDArray[np.float64]:
    """53 random bits per element as float64 in (0, 1): each takes one word of its row's blocks of four."""
    blocks = -(-dim // 4)
    bits = np.random.Philox(counter=first * blocks, key=int.from_bytes(philox_key(b"start", seed, table), "little"))
    words = bits.random_raw(count * blocks * 4).reshape(count, -1)[:, :dim]
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54


def _quantile(u: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    q = (u - 0.5) * (2 * _HALF_WIDTH)
    t = q * q
    return q * (_polynomial(_P, t) / _polynomial(_Q, t))


def _polynomial(coefficients: tuple[float, ...], t: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Evaluate by Horner's rule."""
    value = np.full_like(t, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * t + coefficient
    return value
