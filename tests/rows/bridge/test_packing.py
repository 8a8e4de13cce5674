"""The rows of a step in host memory: where they go, how they are sent, and what the device makes of them."""

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.threads import ThreadTeam
from penstock.model.updates import UpdateRule
from penstock.pyx import partition
from penstock.rows.bridge.packing import Packer
from penstock.rows.bridge.programs import spread
from penstock.rows.bridge.row_format import UNTOUCHED
from penstock.rows.bridge.sharding import Layout
from penstock.rows.bridge.stacking import MemberRows, Stack

ADAGRAD = UpdateRule("adagrad", 1)


def layouts_of(dims, devices, lanes=128, bfloat16=False, rows=300):
    return [Layout(f"t{index}", rows, dim, 1, devices, True, lanes, bfloat16) for index, dim in enumerate(dims)]


def some_rows(rng, member, dim, count, rows=300):
    return MemberRows(member, rng.permutation(rows)[:count], rng.standard_normal((count, dim), np.float32))


def words_of(packed, stack):
    """(device, line) → words, as the device sees them; pads are omitted."""
    actual = {}
    for device, (lines, words, count) in enumerate(zip(packed.lines, packed.words, packed.counts, strict=True)):
        if packed.marks is not None:
            rows = jnp.asarray(words.reshape(-1, stack.line.dim))
            words = np.asarray(spread(stack.line, rows, jnp.asarray(packed.marks[device]), count)[0])
            assert (words[count:] == UNTOUCHED).all()
        assert (lines[count:] >= stack.lines_per_device).all()
        assert len(set(lines.tolist())) == len(lines)
        actual |= {(device, int(line)): words[index] for index, line in enumerate(lines[:count])}
    return actual


@pytest.mark.evidence
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_packed_rows_are_the_words_of_their_lines(data):
    dims = data.draw(st.sampled_from([[8], [24], [32, 32], [64], [100], [128], [200], [8, 32, 100], [1], [3, 3]]))
    devices, threads = data.draw(st.sampled_from([1, 2, 5])), data.draw(st.sampled_from([1, 3]))
    layouts = layouts_of(dims, devices, data.draw(st.sampled_from([1, 128])) if len(set(dims)) == 1 else 128)
    stack = Stack.of(layouts, ADAGRAD, data.draw(st.booleans()))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    several = [some_rows(rng, index, dim, int(rng.integers(0, 300))) for index, dim in enumerate(dims)]
    packer = Packer(stack, ThreadTeam(threads))
    routed, largest = packer.route(several), data.draw(st.sampled_from([128, 32_768]))
    actual = {}
    for span in packer.slices(routed, largest):
        for key, words in words_of(packer.pack(routed, span, largest=largest), stack).items():
            # A line whose rows are in two dispatches is updated twice: no row is in both.
            before = actual.setdefault(key, np.full_like(words, UNTOUCHED))
            assert ((before == UNTOUCHED) | (words == UNTOUCHED)).all()
            actual[key] = np.where(words == UNTOUCHED, before, words)
    members = [
        (layout, layout.line, first, rows.ids, rows.rows)
        for layout, first, rows in zip(layouts, stack.first_lines, several, strict=False)
    ]
    blank = UNTOUCHED if stack.line.masked else 0
    wanted = reference.lines_of_words(members, blank, stack.line.halves * stack.line.width)
    assert {offset: words.tobytes() for offset, words in actual.items()} == {
        offset: item.tobytes() for offset, item in wanted.items()
    }


@pytest.mark.parametrize(("dim", "devices"), [(8, 1), (8, 8), (32, 1), (32, 8), (128, 1), (128, 8)])
def test_a_row_costs_at_most_15_percent_more_than_its_id_and_gradient(dim, devices):
    (layout,) = layouts_of([dim], devices, rows=1_000_000)
    packer = Packer(Stack.of([layout], ADAGRAD), ThreadTeam(1))
    rows = some_rows(np.random.default_rng(0), 0, dim, 131_072, 1_000_000)
    routed = packer.route([rows])
    spans = packer.slices(routed, 32_768)
    sent = sum(array.nbytes for span in spans for array in packer.pack(routed, span).arguments)
    assert sent / 131_072 <= 1.15 * (4 + 4 * dim)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(1, 40), st.integers(0, 9))
def test_lines_are_numbered_by_first_appearance(num_rows, num_lines, seed):
    rng = np.random.default_rng(seed)
    lines = rng.integers(0, num_lines, num_rows + 5).astype(np.int32)
    rows = rng.permutation(num_rows + 5)[:num_rows].astype(np.int32)
    numbers = np.full(num_rows + 5, -1, np.int32)
    distinct = partition.number(rows, lines, numbers)
    wanted, wanted_lines = reference.number(rows, lines)
    assert distinct.tobytes() == wanted_lines.tobytes()
    assert numbers[rows].tobytes() == wanted.tobytes()
    assert (np.delete(numbers, rows) == -1).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(1, 40), st.integers(0, 20), st.integers(0, 9))
def test_rows_of_a_line_get_neighbouring_cells(num_rows, num_lines, pads, seed):
    rng = np.random.default_rng(seed)
    lines = rng.integers(0, num_lines, num_rows + 5).astype(np.int32)
    places = rng.integers(0, 128, num_rows + 5).astype(np.int32)
    rows = rng.permutation(num_rows + 5)[:num_rows].astype(np.int32)
    cells, marks = np.full(num_rows + 5, -1, np.int32), np.zeros(num_rows + pads, np.uint8)
    distinct = partition.number(rows, lines, cells)
    wanted, wanted_marks = reference.group(cells[rows], places[rows], len(marks))
    partition.group(rows, len(distinct), places, cells, marks)
    assert cells[rows].tobytes() == wanted.tobytes()
    assert marks.tobytes() == wanted_marks.tobytes()


def located(ids, vocabulary, mod):
    """As reference.locate, which lists all ids of a table, by division."""
    quotient, remainder = divmod(vocabulary, 1024)
    longer = remainder * (quotient + 1)
    if mod:
        return ids % 1024, ids // 1024
    shard, row = np.divmod(ids - longer, quotient)
    first = np.divmod(ids, quotient + 1)
    return np.where(ids < longer, first[0], remainder + shard), np.where(ids < longer, first[1], row)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 5000) | st.integers(5001, 2**45),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 16),
    st.integers(0, 99),
)
def test_destinations_are_those_of_the_shards(vocabulary, mod, devices, group, seed):
    rng = np.random.default_rng(seed)
    ids = np.append(rng.integers(0, vocabulary, 100), [0, vocabulary - 1])
    shards = (vocabulary, 1024, mod, -(-1024 // devices), -(-vocabulary // 1024))
    out = [np.empty(len(ids), np.int32) for _ in range(3)]
    counts = np.ones(devices, np.int64)
    partition.destinations(ids, *shards, group, 7, *out, counts)
    shard, row = reference.locate(ids, vocabulary, 1024, mod) if vocabulary <= 5000 else located(ids, vocabulary, mod)
    rows = shard % shards[3] * shards[4] + row
    wanted = (shard // shards[3], (7 + rows // group).astype(np.int32), rows % group)
    for actual, expected in zip(out, wanted, strict=True):
        assert actual.tolist() == expected.tolist()
    assert counts.tolist() == (1 + np.bincount(wanted[0], minlength=devices)).tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(1, 9), st.integers(0, 300), st.integers(0, 9))
def test_rows_are_numbered_by_device_in_ranges(num_rows, num_devices, cut, seed):
    devices = np.random.default_rng(seed).integers(0, num_devices, num_rows).astype(np.int32)
    cells, entries = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
    counts = np.bincount(devices, minlength=num_devices)
    next_of, cut = np.zeros(num_devices, np.int64), min(cut, num_rows)
    for span in (slice(0, cut), slice(cut, num_rows)):
        partition.order(devices[span], span.start, next_of, cells[span], np.cumsum(counts) - counts, entries)
    wanted = reference.order(devices, num_devices)
    assert (cells.tolist(), entries.tolist()) == tuple(array.tolist() for array in wanted)
    assert next_of.tolist() == counts.tolist()
    partition.order(devices, 0, np.zeros(num_devices, np.int64), cells, None, None)
    assert cells.tolist() == wanted[0].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.sampled_from([1, 3, 8, 16, 32, 64, 128]), st.integers(1, 3), st.data())
def test_rows_are_laid_into_their_cells(num_rows, dim, group, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    num_devices, size, first = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40)), data.draw(st.integers(0, 9))
    spots = rng.permutation(num_devices * 60 * group)[:num_rows]  # (device, cell, place)
    devices, cells, places = (a.astype(np.int32) for a in np.unravel_index(spots, (num_devices, 60, group)))
    offsets = np.arange(group, dtype=np.int32) * dim
    values, lines = rng.standard_normal((num_rows, dim), np.float32), rng.integers(0, 99, num_rows, np.int32)
    words = np.full((num_devices, size, group * dim), -1, np.int32)
    out_lines = np.full(words.shape[:2], -1, np.int32)
    partition.lay(devices, cells, first, values, words, places, offsets, lines, out_lines)
    wanted, wanted_lines = reference.lay(devices, cells, first, values, words, offsets[places], lines)
    assert words.tobytes() == wanted.tobytes()
    assert out_lines.tobytes() == wanted_lines.tobytes()
    # Past the caches only to whole cache lines, which memory of the heap does not begin with.
    memory = np.full(words.nbytes + 68, 255, np.uint8)
    shift = -memory.ctypes.data % 64 + data.draw(st.sampled_from([0, 4]))
    aligned = memory[shift : shift + words.nbytes].view(np.int32).reshape(words.shape)
    partition.lay(devices, cells, first, values, aligned, places, offsets, lines, out_lines, streams=True)
    assert aligned.tobytes() == wanted.tobytes()
    if group == 1:
        alone = np.full_like(words, -1)
        partition.lay(devices, cells, first, values, alone)
        assert alone.tobytes() == wanted.tobytes()


def test_a_row_that_does_not_fit_a_cell_is_refused():
    cells, rows = np.zeros((1, 2, 8), np.int32), np.arange(2, dtype=np.int32)
    with pytest.raises(ValueError, match="a row of 4 words does not fit a cell of 8"):
        partition.lay(rows * 0, rows, 0, np.ones((2, 4), np.float32), cells, rows, rows + 4)


def test_an_id_beyond_the_table_is_refused():
    packer = Packer(Stack.of(layouts_of([8], 1), ADAGRAD), ThreadTeam(1))
    with pytest.raises(ValueError, match="id at 1: expected 0 <= id < 300, got 300"):
        packer.route([MemberRows(0, np.array([0, 300]), np.zeros((2, 8), np.float32))])
