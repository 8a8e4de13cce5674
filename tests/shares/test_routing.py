"""Frames to the shares of a job: every row arrives once and in order, and everything else of a frame everywhere."""

import numpy as np
import pytest
import reference
from checkpoints import LOG, batch, config_of
from dynamic import config_of as dynamic_config
from dynamic import log_of as dynamic_log
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.frames import Frame, Rows
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.pyx import partition
from penstock.pyx.keys import key_owners
from penstock.shares import Router, frames_of
from penstock.tables.shares import KeyShare, shares_of


def frames_read(config, batches, **options):
    return [(0, frame) for frame in FrameReader(batches, ReadOptions(config.id_ranges, **options))]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(1, 9)), max_size=40),
    st.integers(1, 3),
    st.booleans(),
)
def test_rows_go_to_their_owners_in_their_order(rows, dim, gained):
    owners, numbers, counts = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    rng = np.random.default_rng(len(rows))
    grads = rng.standard_normal((len(rows) + 2, dim)).astype(np.float32)
    which = rng.integers(0, len(grads), len(rows))
    gains = rng.standard_normal(len(rows)).astype(np.float32) if gained else None
    sizes = np.bincount(owners, minlength=4)
    rows_at = np.cumsum(sizes) - sizes
    floats_at = rows_at * dim
    out = np.empty(len(rows), np.int64), np.empty(len(rows) * dim, np.float32), np.empty(len(rows), np.uint32)
    firsts = rows_at.copy()
    partition.scatter(owners, numbers, grads, which, gains, counts, rows_at, floats_at, *out)
    summed = grads[which] if gains is None else grads[which] * gains[:, None]
    for owner, twin in enumerate(reference.scatter(owners, numbers, summed, counts, 4)):
        part = slice(firsts[owner], rows_at[owner])
        got = out[0][part], out[1].reshape(-1, dim)[part], out[2][part]
        assert [item.tolist() for item in got] == [item.tolist() for item in twin]


def test_rows_that_do_not_fit_are_refused_before_anything_is_written():
    first, row = np.zeros(1, np.int64), np.ones((1, 2), np.float32)
    out = np.zeros(0, np.int64), np.zeros(2, np.float32)
    with pytest.raises(IndexError, match="1 rows of 2 floats do not fit"):
        partition.scatter(first, first, row, None, None, None, first.copy(), first.copy(), *out, None)
    with pytest.raises(ValueError, match="expected 0 <= id < 1"):
        partition.scatter(first + 1, first, row, None, None, None, first.copy(), first.copy(), *out, None)
    assert not out[1].any()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("sums", [False, True])
def test_every_row_of_a_frame_arrives_at_one_share(count, sums):
    config = config_of()
    frames = frames_read(config, LOG[:5])
    block = Router(config, count, sums=sums).block([frame for _, frame in frames])
    dims = {spec.name: spec.dim for spec in config.tables}
    mod = config.sharding_strategy == "MOD"
    shares = [shares_of(config.tables, mod, 0, rank, count) for rank in range(count)]
    arrived = [list(frames_of(block.heads, batch, dims)) for batch in block.batches]
    for number, (_, frame) in enumerate(frames):
        for table, blocks in frame.rows.items():
            copies = [rows.copied() for rows in blocks]
            ids, grads = (np.concatenate([getattr(rows, item) for rows in copies]) for item in ("ids", "grads"))
            wanted = {i: [g.tolist() for g in grads[ids == i]] for i in ids.tolist()}
            actual = {}
            for rank in range(count):
                (rows,) = arrived[rank][number].rows[table]
                counts = [1] * len(rows.ids) if rows.counts is None else rows.counts.tolist()
                for i, grad, raw in zip(shares[rank][table].ids(rows.ids).tolist(), rows.grads, counts, strict=True):
                    actual.setdefault(i, []).append((grad.tolist(), raw))
            if not sums:
                assert {i: [grad for grad, _ in rows] for i, rows in actual.items()} == wanted
            else:
                assert {i: rows[0][1] for i, rows in actual.items()} == {i: len(rows) for i, rows in wanted.items()}
                coalesced = reference.coalesce([(ids, grads)], dims[table])
                assert {i: rows[0][0] for i, rows in actual.items()} == dict(
                    zip(coalesced[0].tolist(), coalesced[1].tolist(), strict=True)
                )


def test_a_share_learns_everything_of_a_frame_that_is_not_a_row():
    rows = {"user": (Rows(np.array([4]), np.ones((1, 4), np.float32)),)}
    frame = Frame(rows, 3, 7, "w", (0.5,), {"id_null": 2}, "a.arrows", truncated=1, time=9)
    config = config_of()
    block = Router(config, 2).block([frame])
    dims = {spec.name: spec.dim for spec in config.tables}
    for batch_of in block.batches:
        (got,) = frames_of(block.heads, batch_of, dims)
        for name in (
            "num_rows",
            "local_step",
            "contributor",
            "learning_rates",
            "dropped",
            "source",
            "truncated",
            "time",
        ):
            assert getattr(got, name) == getattr(frame, name), name
        assert list(got.rows) == ["user"]


def test_a_bad_row_is_reported_before_any_share_receives_a_row():
    config = config_of()
    bad = batch(0).slice(0, 1).set_column(4, "gradient", [[float("nan")] * 2])
    with pytest.raises(ps.InputError, match="gradient"):
        Router(config, 2).block([frame for _, frame in frames_read(config, [bad], unvalidated=True)])


@pytest.mark.parametrize("capacity", [5, 8191, 8192, 100_000, 3_000_001])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 64])
def test_the_rows_of_a_dynamic_table_are_divided_in_contiguous_runs(capacity, count):
    shares = [KeyShare(rank, count, "t", capacity, 0) for rank in range(count)]
    first = 0
    for share in shares:
        if share.num_rows:
            assert share.ids(0) == first
            first += share.num_rows
    assert first == capacity
    keys = np.random.default_rng(0).integers(-(2**63), 2**63, 2000)
    owners = key_owners.owners(keys, 0, "t", capacity, count)
    assert set(owners.tolist()) <= {share.rank for share in shares if share.num_rows}


def test_keys_are_routed_as_they_are():
    config = dynamic_config(rows=20_000)
    keys = np.random.default_rng(1).integers(-(2**63), 2**63, 50)
    block = Router(config, 3, seed=5).block([frame for _, frame in frames_read(config, dynamic_log([keys]))])
    arrived = [batch_of["row"].to_numpy() for batch_of in block.batches]
    assert sorted(np.concatenate(arrived).tolist()) == sorted(keys.tolist())
    for rank, group in enumerate(arrived):
        assert set(key_owners.owners(group, 5, "user", 20_000, 3).tolist()) <= {rank}
