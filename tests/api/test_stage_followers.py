"""Deltas as a follower applies them: steps and loads of others between pulls; missing, repeated and damaged deltas."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import DIM, LOG, ROWS, batch, engine_of
from deltas import ALL_COLUMNS, bytes_of, equal, example, follow, follower_of, numbers, step, tables_of

import penstock as ps


def test_steps_of_other_threads_are_in_the_next_delta():
    engine = engine_of(num_required=1)
    follower, reader = follower_of(engine), engine.stage([batch(0), batch(3)], **ALL_COLUMNS)
    first = reader.read_next_batch()
    step(engine, [7, 9])
    step(engine, [9, 11])
    deltas = [first, *reader]
    assert numbers(deltas) == [(1, 0), (4, 1)]
    assert {7, 9, 11} <= set(deltas[1]["id"].to_pylist())
    assert equal(follow(follower, deltas).tables, tables_of(engine))


def test_a_delta_is_of_one_moment_though_others_step_between_its_batches(monkeypatch):
    monkeypatch.setattr("penstock.io.delta_format.MOST_ROWS", 8)
    engine, alone = engine_of(num_required=1), engine_of(num_required=1)
    wanted = bytes_of(alone.stage([batch(0)], **ALL_COLUMNS))
    reader = engine.stage([batch(0)], **ALL_COLUMNS)
    deltas = [reader.read_next_batch()]
    step(engine, range(ROWS))
    deltas += itertools.islice(reader, len(wanted) - 1)
    assert bytes_of(deltas) == wanted
    follower = follow(follower_of(engine_of(num_required=1)), [*deltas, *reader])
    assert equal(follower.tables, tables_of(engine))


@pytest.mark.parametrize("load", ["load_parameters", "read_tables"])
def test_loaded_rows_are_in_the_next_delta_or_at_the_end(load, tmp_path):
    def change(engine):
        if load == "read_tables":
            engine.read_tables(tmp_path)
        else:
            engine.load_parameters("user", np.ones((2, DIM)), ids=[3, 4], accumulators=np.ones((2, DIM)))

    engine_of(seed=5).write_tables(tmp_path)
    engine = engine_of(num_required=1)
    follower, reader = follower_of(engine), engine.stage([batch(0), batch(1)], **ALL_COLUMNS)
    deltas = [reader.read_next_batch()]
    change(engine)
    deltas.append(reader.read_next_batch())
    change(engine)
    deltas += reader
    assert numbers(deltas) == [(1, 0), (2, 1), (2, 2)]
    assert equal(follow(follower, deltas).tables, tables_of(engine))


# ---- missing, repeated, cut, damaged


def staged(**options):
    engine = engine_of()
    return follower_of(engine_of()), list(engine.stage(LOG, **ALL_COLUMNS, **options)), engine


def test_a_missing_delta_is_detected_by_its_number():
    follower, deltas, _ = staged()
    with pytest.raises(example.BrokenError, match="delta 5 follows on 4, and we are at 3: deltas are missing"):
        follow(follower, deltas[:3] + deltas[4:])


def test_a_delta_lost_with_its_engine_shows_in_the_next_parent(tmp_path):
    follower, engine = follower_of(engine_of()), engine_of()

    def save(*_):
        if engine.global_step == 4:
            engine.save(tmp_path / "c")

    reader = engine.stage(LOG, **ALL_COLUMNS, per_steps=3, progress=save)
    follow(follower, [reader.read_next_batch()])
    reader.read_next_batch()  # the follower does not take it: it is lost with the engine
    deltas = list(ps.Engine.restore(tmp_path / "c").stage(LOG, **ALL_COLUMNS, per_steps=3, resume=True))
    assert numbers(deltas)[0] == (6, 4)
    with pytest.raises(example.BrokenError, match="delta 6 follows on 4, and we are at 3: deltas are missing"):
        follow(follower, deltas)


def test_a_repeated_delta_is_skipped():
    follower, deltas, engine = staged()
    follow(follower, deltas[:7] + deltas[4:])
    assert (follower.num_applied, follower.num_repeated) == (12, 3)
    assert equal(follower.tables, tables_of(engine))


def test_a_damaged_or_truncated_delta_is_detected(monkeypatch):
    monkeypatch.setattr("penstock.io.delta_format.MOST_ROWS", 16)
    follower, deltas, _ = staged()
    rows = deltas[1]["id"].to_numpy().copy()
    rows[0] += 1
    damaged = deltas[1].set_column(2, deltas[1].schema.field("id"), pa.array(rows))
    for batches, message in (
        ([deltas[0], damaged], "checksum differs"),
        ([deltas[0], *deltas[2:]], "checksum differs"),
        (deltas[1:], "checksum differs"),
        (deltas[:1], "ends inside a delta"),
    ):
        with pytest.raises(example.BrokenError, match=message):
            follow(example.Follower(tables_of(engine_of())), batches)
    assert follower.num_applied == 0
