"""The rows of a step in host memory: where they go, how they are sent, and what the device makes of them."""

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bridge.packing import Packer
from penstock.bridge.programs import spread
from penstock.bridge.row_format import UNTOUCHED
from penstock.bridge.sharding import Layout
from penstock.bridge.stacking import MemberRows, Stack
from penstock.pyx import partition
from penstock.threads import ThreadTeam
from penstock.updates import UpdateRule

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
    routed = packer.route(several)
    actual = {}
    for entries in packer.slices(routed):
        actual |= words_of(packer.pack(routed, entries), stack)
    members = [
        (layout, layout.line, first, rows.ids, rows.rows)
        for layout, first, rows in zip(layouts, stack.first_lines, several, strict=False)
    ]
    blank = UNTOUCHED if stack.line.masked else 0
    wanted = reference.lines_of_words(members, blank, stack.line.halves * stack.line.width)
    assert {offset: words.tobytes() for offset, words in actual.items()} == {
        offset: item.tobytes() for offset, item in wanted.items()
    }


@pytest.mark.parametrize("lanes", [1, 128])
def test_keys_of_16_bit_weights_follow_their_rows(lanes):
    (layout,) = layouts_of([8], 2, lanes, bfloat16=True)
    stack = Stack.of([layout], ADAGRAD)
    assert stack.compact
    rng = np.random.default_rng(0)
    keys = rng.integers(1, 2**32, 200, np.uint32)
    rows = some_rows(rng, 0, 8, 200)._replace(keys=keys)
    packer = Packer(stack, ThreadTeam(1))
    routed = packer.route([rows])
    ((entries),) = packer.slices(routed)
    packed = packer.pack(routed, entries)
    for device in range(2):
        arrays = (packed.words[device].reshape(-1, 8), packed.marks[device], packed.counts[device], packed.keys[device])
        _, of_rows = spread(stack.line, *map(jnp.asarray, arrays))
        wanted = np.zeros((len(packed.lines[device]), stack.line.group), np.uint32)
        place = {int(line): index for index, line in enumerate(packed.lines[device])}
        for entry in entries[device]:
            wanted[place[int(routed.lines[entry])], routed.places[entry]] = keys[entry]
        assert np.asarray(of_rows).tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("dim", "devices"), [(8, 1), (8, 8), (32, 1), (32, 8), (128, 1), (128, 8)])
def test_a_row_costs_at_most_15_percent_more_than_its_id_and_gradient(dim, devices):
    (layout,) = layouts_of([dim], devices, rows=1_000_000)
    packer = Packer(Stack.of([layout], ADAGRAD), ThreadTeam(1))
    rows = some_rows(np.random.default_rng(0), 0, dim, 131_072, 1_000_000)
    routed = packer.route([rows])
    sent = sum(array.nbytes for item in packer.slices(routed) for array in packer.pack(routed, item).arguments)
    assert sent / 131_072 <= 1.15 * (4 + 4 * dim)


def test_more_rows_than_a_dispatch_takes_are_packed_into_several():
    (layout,) = layouts_of([8], 1, rows=100_000)
    stack = Stack.of([layout], ADAGRAD)
    packer = Packer(stack, ThreadTeam(2))
    routed = packer.route([some_rows(np.random.default_rng(0), 0, 8, 70_000, 100_000)])
    packed = [packer.pack(routed, entries) for entries in packer.slices(routed)]
    assert [packed_rows.marks.shape[1] for packed_rows in packed] == [32_768, 32_768, 5248]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(1, 40), st.integers(0, 9))
def test_lines_are_numbered_by_first_appearance(num_rows, num_lines, seed):
    rng = np.random.default_rng(seed)
    lines = rng.integers(0, num_lines, num_rows + 5).astype(np.int32)
    rows = rng.permutation(num_rows + 5)[:num_rows].astype(np.int32)
    for got, wanted in zip(partition.number(rows, lines), reference.number(rows, lines), strict=True):
        assert got.tobytes() == wanted.astype(np.int32).tobytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.booleans(), st.integers(1, 9), st.integers(1, 16))
def test_destinations_are_those_of_the_shards(vocabulary, mod, devices, group):
    ids = np.random.default_rng(vocabulary).integers(0, vocabulary, 100)
    layout = Layout("t", vocabulary, 8, 1, devices, mod)
    out = [np.empty(100, np.int32) for _ in range(3)]
    shards = (vocabulary, 1024, mod, layout.shards_per_device, layout.rows_per_shard)
    partition.destinations(ids, *shards, group, 7, *out)
    owners, rows = layout.place(ids)
    for got, wanted in zip(out, (owners, 7 + rows // group, rows % group), strict=True):
        assert got.tolist() == wanted.tolist()
    order, starts = partition.by_device(out[0], devices)
    assert order.tolist() == np.argsort(owners, kind="stable").tolist()
    assert np.diff(starts).tolist() == np.bincount(owners, minlength=devices).tolist()


ROWS, LINES, GRADS = np.arange(2, dtype=np.int32), np.array([0, 0], np.int32), np.ones((2, 4), np.float32)


@pytest.mark.parametrize(
    ("function", "arguments", "problem"),
    [
        ("by_device", (np.array([0, 2], np.int32), 2), "row 1: expected a device below 2, got 2"),
        ("number", (np.array([5], np.int32), LINES), "row 5 is not one of 2"),
        ("lay_lines", (ROWS, LINES + 3, LINES, 0, GRADS, np.zeros((2, 8), np.int32)), "row 0 of 4 words does not fit"),
        ("lay_lines", (ROWS, LINES, LINES + 5, 0, GRADS, np.zeros((2, 8), np.int32)), "row 0 of 4 words does not fit"),
        ("lay_lines", (ROWS, LINES, LINES, 1, GRADS, np.zeros((2, 8), np.int32)), "row 0 of 4 words does not fit"),
        (
            "lay_rows",
            (ROWS, LINES, LINES, 0, GRADS, LINES[:1] + 9, np.zeros((2, 4), np.int32), np.zeros(2, np.uint8), LINES + 0),
            "row 0 of line 0 does not fit among 2",
        ),
    ],
)
def test_rows_out_of_place_are_refused(function, arguments, problem):
    with pytest.raises(ValueError, match=problem):
        getattr(partition, function)(*arguments)


def test_an_id_beyond_the_table_is_refused():
    packer = Packer(Stack.of(layouts_of([8], 1), ADAGRAD), ThreadTeam(1))
    with pytest.raises(ValueError, match="id at 1: expected 0 <= id < 300, got 300"):
        packer.route([MemberRows(0, np.array([0, 300]), np.zeros((2, 8), np.float32))])
