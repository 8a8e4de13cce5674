"""Engine.stage: gradients in, the rows that change out."""

import gc
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import LOG, ROWS, batch, config_of, engine_of
from deltas import ALL_COLUMNS, bytes_of, equal, follow, follower_of, numbers, tables_of
from ipc import write

import penstock as ps
import penstock.updates as o

LAZY = [o.SGD(0.1), o.Adagrad(0.1), o.FTRL(0.1), o.Adam(0.1), o.Momentum(0.1)]


def counted(batches):
    """The batches, and how many of them were asked for."""
    asked = []

    def give():
        for number, each in enumerate(batches):
            asked.append(number)
            yield each

    return give(), asked


def open_files():
    """What this process has open or mapped."""
    maps = Path("/proc/self/maps").read_text().split()
    return {*maps, *(os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())}


# ---- what comes out


def test_options_extend_the_schema_of_deltas():
    engine = engine_of()
    assert engine.stage(LOG).schema.names == ["table", "step", "id", "row"]
    schema = engine.stage(LOG, op=True, **ALL_COLUMNS).schema
    assert schema.names == ["table", "step", "id", "row", "accumulators", "op", "parent", "checksum", "rows_left"]
    assert schema.field("table").type == pa.dictionary(pa.int32(), pa.utf8())
    assert schema.field("row").type == schema.field("accumulators").type == pa.list_(pa.float32())
    assert (schema.field("step").type, schema.field("id").type) == (pa.int64(), pa.int64())
    assert [name for name in schema.names if schema.field(name).nullable] == ["accumulators"]


def test_a_delta_holds_the_rows_that_a_step_touched_as_lookup_gives_them():
    engine = engine_of(num_required=1)
    for delta in engine.stage([batch(0), batch(1)], slots=["accumulators"], op=True):
        rows = delta.to_pydict()
        assert set(rows["step"]) == {engine.global_step}
        assert set(rows["op"]) == {"upsert"}
        for name in ("user", "item"):
            own = [n for n, table in enumerate(rows["table"]) if table == name]
            ids = [rows["id"][n] for n in own]
            value = batch(engine.global_step - 1).to_pydict()
            assert ids == sorted({i for i, table in zip(value["id"], value["table"], strict=True) if table == name})
            assert [rows["row"][n] for n in own] == engine.lookup(name, ids).tolist()
            slots = [rows["accumulators"][n] for n in own]
            if name == "item":
                assert set(slots) == {None}
            else:
                assert slots == engine.retrieve_parameters(name)["accumulators"][ids].tolist()


def test_deltas_have_tables_in_configuration_order_and_ascending_ids():
    for delta in engine_of().stage(LOG):
        names, ids = delta["table"].to_pylist(), delta["id"].to_numpy()
        assert names == sorted(names, key=["user", "item"].index)
        for name in ("user", "item"):
            assert (np.diff(ids[np.array(names) == name]) > 0).all()


@pytest.mark.parametrize(
    "optimizer", [*LAZY, o.Adam(0.1, lazy_adam=False), o.Lion(0.1, use_non_lazy_lion=True)], ids=repr
)
def test_base_and_deltas_make_the_tables_in_a_plain_reader(optimizer):
    engine = engine_of(config_of(optimizer=optimizer))
    follower = follow(follower_of(engine), engine.stage(LOG, **ALL_COLUMNS))
    assert equal(follower.tables, tables_of(engine))
    assert (follower.step, follower.num_applied, follower.num_repeated) == (12, 12, 0)
    plain = engine_of(config_of(optimizer=optimizer))
    plain.run(LOG)
    assert plain.state_hash() == engine.state_hash()


def test_deltas_of_tables_without_accumulation_hold_each_row_once():
    engine = engine_of(config_of(accumulate=False))
    assert equal(follow(follower_of(engine), engine.stage(LOG, **ALL_COLUMNS)).tables, tables_of(engine))


def test_a_step_that_touched_nothing_has_no_delta_and_is_not_missed():
    empty = pa.record_batch({name: batch(0)[name].slice(0, 0) for name in batch(0).schema.names})
    assert engine_of(num_required=1).stage([empty]).read_all().num_rows == 0
    engine = engine_of(num_required=1)
    follower = follower_of(engine)
    deltas = list(engine.stage([batch(0)], **ALL_COLUMNS))
    engine.apply({})
    deltas += engine.stage([batch(2)], **ALL_COLUMNS)
    assert numbers(deltas) == [(1, 0), (3, 1)]
    assert equal(follow(follower, deltas).tables, tables_of(engine))


def test_a_large_delta_is_cut_into_batches_and_counts_down_what_is_left(monkeypatch):
    monkeypatch.setattr("penstock.io.delta_format.MOST_ROWS", 1000)
    engine = engine_of(config_of(optimizer=o.Adam(0.1, lazy_adam=False)), num_required=1)
    deltas = list(engine.stage([batch(0)], **ALL_COLUMNS))
    assert [delta.num_rows for delta in deltas[:-1]] == [1000] * (len(deltas) - 1)
    total = sum(delta.num_rows for delta in deltas)
    assert total > ROWS
    assert [delta["rows_left"][0].as_py() for delta in deltas] == [*range(total - 1000, 0, -1000), 0]


def test_batches_are_no_larger_than_64_thousand_rows_or_16_megabytes():
    table = ps.TableConfig(66_000, 256, name="wide", optimizer=o.SGD(0.1))
    narrow = ps.TableConfig(66_000, 1, name="narrow", optimizer=o.SGD(0.1))
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([narrow, table]))
    ids = np.arange(66_000)
    frames = [
        pa.record_batch(
            {"id": ids, "gradient": pa.array(list(np.ones((len(ids), dim), np.float32))), "table": [name] * len(ids)}
        )
        for name, dim in (("narrow", 1), ("wide", 256))
    ]
    sizes = [(delta.num_rows, delta.nbytes) for delta in engine.stage(frames)]
    assert sum(rows for rows, _ in sizes) == 132_000
    assert max(rows for rows, _ in sizes) == 1 << 16
    assert max(size for _, size in sizes) < 18 << 20


# ---- intervals


def test_deltas_per_steps_hold_each_row_once_with_its_last_value():
    engine, every = engine_of(), engine_of()
    follower = follower_of(engine)
    deltas = list(engine.stage(LOG, per_steps=5, **ALL_COLUMNS))
    assert numbers(deltas) == [(5, 0), (10, 5), (12, 10)]
    assert equal(follow(follower, deltas).tables, tables_of(engine))
    assert sum(d.num_rows for d in deltas) < sum(d.num_rows for d in every.stage(LOG))


def test_coalesced_per_rows_and_per_seconds():
    engine = engine_of()
    follower = follower_of(engine)
    deltas = list(engine.stage(LOG, per_rows=150, **ALL_COLUMNS))
    assert 1 < len(deltas) < 12
    assert all(delta.num_rows <= 300 for delta in deltas)
    assert equal(follow(follower, deltas).tables, tables_of(engine))
    assert len(list(engine_of().stage(LOG, per_seconds=1e6))) == 1
    assert len(list(engine_of().stage(LOG, per_seconds=0))) == 12


def test_accumulated_frames_are_in_a_delta_after_a_flush():
    engine = engine_of(num_required=24)
    deltas = list(engine.stage(LOG, flush=True, **ALL_COLUMNS))
    assert numbers(deltas) == [(1, 0), (2, 1)]
    assert list(engine_of(num_required=100).stage(LOG)) == []


# ---- the same bytes


@pytest.mark.promise("The bits depend on no record batches, threads or number of devices")
def test_deltas_are_the_same_bytes_whatever_the_batches_threads_or_devices(mesh_of):
    wanted = bytes_of(engine_of().stage(LOG, **ALL_COLUMNS))
    chopped = [piece for frame in LOG for piece in (frame.slice(0, 7), frame.slice(7, 20), frame.slice(27))]
    assert bytes_of(engine_of().stage(chopped, **ALL_COLUMNS)) == wanted
    assert bytes_of(engine_of().stage(pa.Table.from_batches(LOG), **ALL_COLUMNS)) == wanted
    for threads, devices in ((1, 1), (2, 3), (4, 8)):
        engine = engine_of(mesh=mesh_of(devices), threads=threads)
        assert bytes_of(engine.stage(LOG, **ALL_COLUMNS)) == wanted


# ---- laziness


def test_nothing_is_read_before_a_batch_is_asked_for():
    frames, asked = counted(LOG)
    engine = engine_of()
    reader = engine.stage(frames)
    assert (asked, engine.global_step) == ([], 0)
    reader.read_next_batch()
    assert engine.global_step == 1
    assert asked == [0, 1, 2, 3]  # a frame ends where the next begins
    reader.read_next_batch()
    assert (asked, engine.global_step) == ([0, 1, 2, 3, 4, 5, 6], 2)


def test_an_abandoned_reader_leaves_the_engine_at_a_whole_frame_with_its_files_closed(tmp_path):
    log = write(tmp_path / "log.arrows", LOG)
    engine, plain = engine_of(), engine_of()
    reader = engine.stage(log)
    reader.read_next_batch()
    assert log in open_files()
    del reader
    gc.collect()
    assert log not in open_files()
    plain.run(LOG, limit=3)
    assert engine.state_hash() == plain.state_hash()
    for each in (engine, plain):
        each.run(LOG[3:])
    assert engine.state_hash() == plain.state_hash()


def test_other_arrow_libraries_take_it_through_the_stream_protocol():
    engine = engine_of()
    reader = pa.RecordBatchReader.from_stream(engine.stage(LOG))
    assert engine.global_step == 0
    assert pa.table(reader).num_rows > 0
    assert engine.global_step == 12


def test_bad_input_is_raised_after_the_deltas_of_the_frames_before_it():
    bad = pa.record_batch({**{n: LOG[3][n] for n in LOG[3].schema.names}, "id": pa.array([-1] * LOG[3].num_rows)})
    for options in ({}, {"per_steps": 100}):
        reader = engine_of(num_required=1).stage([LOG[0], LOG[1], bad], **ALL_COLUMNS, **options)
        first = reader.read_next_batch()
        assert first["step"][0].as_py() == 1 if not options else 2
        with pytest.raises(ps.InputError, match="expected 0 <= id"):
            list(reader)


def test_wrong_arguments_of_stage_are_refused_at_the_call():
    engine = engine_of()
    for wrong, message in (
        ({"slots": ["momenta"]}, r"no table has a slot 'momenta' \(there are: accumulators\)"),
        ({"slots": 3}, "slots: expected True, False or names of slots, got 3"),
        ({"columns": 3}, "columns: expected a mapping role → name, got 3"),
        ({"columns": {"id": 3}}, "columns: expected a mapping role → name"),
        ({"per_steps": 0}, "per_steps: expected at least 1"),
        ({"per_rows": "x"}, "per_rows"),
        ({"per_seconds": -1}, "per_seconds: expected a number of seconds that is not negative"),
        ({"per_seconds": None, "per_steps": 2.5}, "per_steps"),
        ({"on_bad_row": "x"}, "on_bad_row"),
        ({"progress": 3}, "progress: expected something to call, got 3"),
    ):
        with pytest.raises(ps.UsageError, match=message):
            engine.stage(LOG, **wrong)
    with pytest.raises(ps.InputError, match="no such file"):
        engine.stage("nowhere.arrows")


@pytest.mark.parametrize(
    ("call", "wrong", "message"),
    [
        ("stage", "slot", "did you mean 'slots'?"),
        ("stage", "check_point", "did you mean 'checkpoint'?"),
        ("stage", "deltas", "expected one of allow_missing_end, as_files, checkpoint, "),
        ("run", "learning_rate", "did you mean 'learning_rates'?"),
        ("run", "delta", "did you mean 'deltas'?"),
        ("run", "clock", "expected one of allow_missing_end, as_files, checkpoint, "),
    ],
)
def test_an_unknown_argument_is_named_with_the_nearest_one(call, wrong, message):
    engine = engine_of()
    with pytest.raises(ps.UsageError) as error:
        getattr(engine, call)(LOG, **{wrong: None})
    assert str(error.value).startswith(f"Engine.{call}: unknown argument '{wrong}'; {message}")
    assert isinstance(error.value, TypeError)  # as for any function of Python
    assert "__init__" not in str(error.value)
    assert engine.global_step == 0
