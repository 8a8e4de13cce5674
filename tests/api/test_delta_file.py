"""Deltas into a file, with checkpoints: whole or absent, continued, nothing missing and nothing twice."""

import gc
import os
import threading

import pyarrow as pa
import pyarrow.ipc
import pytest
from checkpoints import LOG, engine_of, log_of
from deltas import ALL_COLUMNS, bytes_of, equal, follow, follower_of, numbers, tables_of
from faults.operations import full_disk

import penstock as ps
from penstock.base.filesystem import atomic_files
from penstock.io.sources.opening import open_source


def read(path):
    """The batches of a file of deltas, its checksums checked on the way."""
    for part in open_source(path).parts():
        batches = [batch.data for batch in part.batches(part.schema.names)]
        assert part.verified
    return batches


def wanted(**options):
    return list(engine_of().stage(LOG, **ALL_COLUMNS, **options))


def restored(folder):
    return ps.Engine.restore(folder) if any(folder.glob("*.commit")) else engine_of()


def test_a_run_writes_its_deltas_into_a_log_that_a_plain_reader_takes(tmp_path):
    engine, file = engine_of(), tmp_path / "deltas.arrows"
    report = engine.run(LOG, deltas=file, slots=True)
    assert report.steps == 12
    assert bytes_of(read(file)) == bytes_of(wanted())
    with pa.ipc.open_stream(file) as batches:
        assert equal(follow(follower_of(engine_of()), batches).tables, tables_of(engine))
    assert [path.name for path in tmp_path.iterdir()] == ["deltas.arrows"]


def test_delta_options_need_deltas():
    with pytest.raises(ps.UsageError, match="slots: sets what deltas hold; give deltas="):
        engine_of().run(LOG, slots=True)


def test_after_bad_input_the_file_holds_the_deltas_of_the_whole_frames(tmp_path):
    bad = pa.record_batch({**{n: LOG[6][n] for n in LOG[6].schema.names}, "id": pa.array([-1] * LOG[6].num_rows)})
    with pytest.raises(ps.InputError, match="expected 0 <= id"):
        engine_of().run([*LOG[:6], bad], deltas=tmp_path / "d", slots=True)
    assert bytes_of(read(tmp_path / "d")) == bytes_of(wanted()[:2])


def test_a_disk_that_is_full_leaves_no_file_and_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_files, "BUFFER_BYTES", 16)
    monkeypatch.setattr(atomic_files, "operations", full_disk(20))
    with pytest.raises(OSError, match="No space left") as caught:
        engine_of().run(LOG, deltas=tmp_path / "d.arrows")
    assert caught.value.filename == str(tmp_path / "d.arrows")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("A file of deltas has every delta once, however often a run was resumed")
def test_runs_continue_their_delta_file(tmp_path):
    file, folder = tmp_path / "d.arrows", tmp_path / "c"
    for limit in (0, 7, 7, 21, None):
        engine = restored(folder)
        engine.run(LOG, deltas=file, slots=True, checkpoint=folder, resume=True, limit=limit)
        assert numbers(read(file)) == [(step + 1, step) for step in range(engine.global_step)]
    assert bytes_of(read(file)) == bytes_of(wanted())


@pytest.mark.sampled("3-{'per_steps': 4}", "6-{'per_steps': 4}", "6-{'per_rows': 100}")
@pytest.mark.parametrize("options", [{}, {"per_steps": 4}, {"per_rows": 100}], ids=str)
@pytest.mark.parametrize("pulls", [1, 3, 6])
def test_a_consumer_that_starts_again_gets_what_it_lacks_and_knows_what_it_has(tmp_path, options, pulls):
    arguments = {"checkpoint": tmp_path / "c", "every": 2, "resume": True, **ALL_COLUMNS, **options}
    follower, seen, batch = follower_of(engine_of()), {}, LOG[0]
    num_restarts = -1
    while batch is not None:
        num_restarts += 1
        engine = restored(tmp_path / "c")
        reader = engine.stage(LOG, **arguments)
        for _ in range(pulls):
            batch = next(reader, None)
            if batch is None:
                break
            follower.take(batch)
            ((number, _),) = numbers([batch])
            (now,) = bytes_of([batch])
            assert seen.setdefault(number, now) == now
        del reader
        gc.collect()
        pulls += 1  # who dies before every commit never gets anywhere
    assert equal(follower.tables, tables_of(engine))
    assert [seen[n] for n in sorted(seen)] == bytes_of(wanted(**options))
    assert (follower.num_repeated > 0) == (num_restarts > 0)


def test_another_file_than_the_checkpoints_is_refused(tmp_path):
    file, folder = tmp_path / "d.arrows", tmp_path / "c"
    arguments = {"deltas": file, "checkpoint": folder, "resume": True}
    engine_of().run(LOG, limit=12, **arguments)
    good = file.read_bytes()
    for bad, message in ((good[:-3000], "holds other deltas"), (b"x" * len(good), "holds other deltas")):
        file.write_bytes(bad)
        with pytest.raises(ps.StateError, match=message):
            restored(folder).run(LOG, **arguments)
        assert file.read_bytes() == bad
    file.write_bytes(good)
    with pytest.raises(ps.StateError, match="its deltas have other columns"):
        restored(folder).run(LOG, slots=True, **arguments)
    assert file.read_bytes() == good
    restored(folder).run(LOG, **arguments)
    assert bytes_of(read(file)) == bytes_of(engine_of().stage(LOG, numbered=True))


def test_after_going_back_to_an_older_commit_the_file_has_the_deltas_of_the_new_steps_alone(tmp_path):
    file, folder = tmp_path / "d.arrows", tmp_path / "c"
    arguments = {"deltas": file, "checkpoint": folder, "resume": True}
    other = LOG[:12] + log_of(range(4, 9), seed=1)
    for limit in (12, None):
        restored(folder).run(LOG, limit=limit, **arguments)
    first = file.read_bytes()
    before, newest = sorted(folder.glob("*.commit"))[-2:]
    kept = newest.read_bytes()
    newest.unlink()  # as the error about a damaged commit advises
    engine = restored(folder)
    engine.run(other, **arguments)
    whole = engine_of()
    assert bytes_of(read(file)) == bytes_of(whole.stage(other, numbered=True))
    assert engine.state_hash() == whole.state_hash()
    for commit in folder.glob("*.commit"):  # a backup of the folder, without the file
        if commit.name > before.name:
            commit.unlink()
    newest.write_bytes(kept)
    written = file.read_bytes()
    assert written != first
    with pytest.raises(ps.StateError):
        restored(folder).run(LOG, **arguments)
    assert file.read_bytes() == written


def test_a_delta_file_with_a_gap_is_refused_and_a_new_one_begins(tmp_path):
    file, folder = tmp_path / "d.arrows", tmp_path / "c"
    engine_of().run(LOG, limit=12, deltas=file, checkpoint=folder)
    restored(folder).run(LOG, limit=18, checkpoint=folder, resume=True)
    with pytest.raises(ps.StateError, match="its last delta is of step 4 and the checkpoint of step 6"):
        restored(folder).run(LOG, deltas=file, checkpoint=folder, resume=True)
    restored(folder).run(LOG, deltas=tmp_path / "new", checkpoint=folder, resume=True)
    assert numbers(read(tmp_path / "new"))[0] == (7, 6)


def test_a_pipe_gets_the_deltas_as_they_come(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    got = []

    def take():
        with open(tmp_path / "pipe", "rb") as pipe:
            got.extend(pa.ipc.open_stream(pipe))

    reading = threading.Thread(target=take)
    reading.start()
    engine_of().run(LOG, deltas=tmp_path / "pipe", slots=True)
    reading.join()
    assert bytes_of(got[:-1]) == bytes_of(wanted())  # the last is the log's closing record
    assert got[-1].num_rows == 0


def test_deltas_to_a_uri_cannot_be_resumed(tmp_path):
    uri = (tmp_path / "d.arrows").as_uri()
    engine_of().run(LOG, deltas=uri, slots=True)
    assert bytes_of(read(tmp_path / "d.arrows")) == bytes_of(wanted())
    with pytest.raises(ps.UsageError, match="with a checkpoint deltas go into a file"):
        engine_of().run(LOG, deltas=uri, checkpoint=tmp_path / "c")
    with pytest.raises(ps.UsageError, match="nosuch://x"):
        engine_of().run(LOG, deltas="nosuch://x")
