"""Deltas of many processes: one file, byte for byte that of one process. Members are threads here."""

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import DIM, ROWS, batch, config_of
from deltas import bytes_of, equal, follow, follower_of, tables_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ipc import write
from jobs import all_well, replayed, together

import penstock as ps
from penstock.config import optimizers as o
from penstock.distributed.member import Member
from penstock.errors import InputError, UsageError
from penstock.io.storage import delta_sink

THREE = {"num_required": 3}
WHOLE = o.Adam(0.1, lazy_adam=False)
CONFIGS = {
    "some rows": config_of(),
    "whole tables": config_of(optimizer=WHOLE),
    "each frame by itself": config_of(accumulate=False),
    "fewer rows than processes": config_of(more=[ps.TableConfig(1, DIM, name="small", optimizer=WHOLE)]),
}


@pytest.fixture
def logs(tmp_path):
    return [write(tmp_path / f"{n}.arrows", [batch(step, n) for step in range(8)]) for n in range(3)]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    """A delta is several batches, and a process's part of it is sent in several pieces."""
    monkeypatch.setattr("penstock.io.storage.delta_format.MOST_ROWS", 30)


def alone(config, logs, file, engine=THREE, **arguments):
    """The bytes that one process writes."""
    ps.Engine(config, **engine).run(logs, merge="round", deltas=file, **arguments)
    return file.read_bytes()


def of_job(count, config, logs, file, engine=THREE, **arguments):
    replayed(count, config, logs, engine=engine, deltas=file, **arguments)
    return file.read_bytes()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_file_of_a_job_is_that_of_one_process(logs, tmp_path, kind, count):
    how = {"slots": True, "flush": True}
    wanted = alone(CONFIGS[kind], logs, tmp_path / "one", **how)
    assert of_job(count, CONFIGS[kind], logs, tmp_path / "job", **how) == wanted


@pytest.mark.parametrize("how", [{"per_steps": 3}, {"per_rows": 200}, {"per_seconds": 3600}], ids=repr)
def test_intervals_end_where_those_of_one_process_do(logs, tmp_path, how):
    assert of_job(2, config_of(), logs, tmp_path / "job", **how) == alone(config_of(), logs, tmp_path / "one", **how)


def test_rows_that_come_again_count_again_however_many_have_come(logs, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.checkpoint.dirty_rows.MERGE_IDS", 8)
    of = {"per_rows": 200}
    assert of_job(2, config_of(), logs, tmp_path / "job", **of) == alone(config_of(), logs, tmp_path / "one", **of)


@given(
    st.lists(st.lists(st.lists(st.integers(0, 6), max_size=6), max_size=4), min_size=1, max_size=3),
    st.integers(1, 3),
    st.booleans(),
)
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_file_of_any_log(tmp_path_factory, sources, num_required, whole):
    """Steps that touch nothing, or nothing of some process, are likely."""
    table = ps.TableConfig(7, 2, name="t", optimizer=WHOLE if whole else o.Adagrad(0.1))
    config, folder = ps.EmbeddingConfig.from_tables([table]), tmp_path_factory.mktemp("log")
    logs = [write(folder / f"{n}", [frame(ids) for ids in [*of, []]]) for n, of in enumerate(sources)]
    engine = {"num_required": num_required}
    wanted = alone(config, logs, folder / "one", engine)
    for count in (2, 3):
        assert of_job(count, config, logs, folder / f"job of {count}", engine) == wanted


def frame(ids):
    grads = np.random.default_rng(len(ids)).standard_normal((len(ids), 2)).tolist()
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "gradient": pa.array(grads, pa.list_(pa.float32(), 2))})


@pytest.mark.parametrize(("before", "after"), [(2, 3), (1, 2), (3, 1)])
def test_after_a_commit_the_file_goes_on_whatever_the_number_of_processes(logs, tmp_path, before, after):
    alone(config_of(), logs, tmp_path / "one")
    folder, file = tmp_path / "c", tmp_path / "job"
    how = {"checkpoint": folder, "every": 1, "deltas": file}
    replayed(before, config_of(), logs, engine=THREE, limit=13, **how)

    def work(peers):
        Member.restored(peers, folder).run(logs, resume=True, **how)

    all_well(together(after, work))
    assert bytes_of(batches_of(file)) == bytes_of(batches_of(tmp_path / "one"))


def batches_of(file):
    with pa.ipc.open_stream(file) as stream:
        return [each for each in stream if each.num_rows]


def test_a_bad_row_ends_everybody_after_the_deltas_of_the_frames_before_it(logs, tmp_path):
    bad = batch(4, 1).set_column(3, "id", pa.array([ROWS] * 40))
    logs[1] = write(tmp_path / "bad.arrows", [*(batch(step, 1) for step in range(4)), bad])
    with pytest.raises(InputError):
        alone(config_of(), logs, tmp_path / "one", per_steps=3)

    def work(peers):
        Member(peers, config_of(), **THREE).run(logs, deltas=tmp_path / "job", per_steps=3)

    assert {type(error) for error in together(2, work)} == {InputError}
    assert (tmp_path / "job").read_bytes() == (tmp_path / "one").read_bytes()


def test_a_file_that_is_there_already_is_an_error_everywhere(logs, tmp_path):
    (tmp_path / "job").write_text("mine")

    def work(peers):
        Member(peers, config_of(), **THREE).run(logs, deltas=tmp_path / "job")

    for error in together(2, work):
        assert isinstance(error, UsageError)
        assert "exists; deltas are never written over" in str(error)


def test_a_file_that_cannot_be_written_ends_everybody_with_the_first_ones_reason(logs, tmp_path, monkeypatch):
    def full(self, batch):
        raise OSError(28, "No space left on device", self.name)

    monkeypatch.setattr(delta_sink.DeltaFile, "write", full)

    def work(peers):
        Member(peers, config_of(), **THREE).run(logs, deltas=tmp_path / "job", checkpoint=tmp_path / "c", every=1)

    for error in together(2, work):
        assert isinstance(error, OSError)
        assert "No space left on device" in str(error)
    assert not list((tmp_path / "c").glob("*.commit"))


def test_one_that_fails_by_itself_ends_the_others_with_its_reason(logs, tmp_path):
    def work(peers):
        def fails(counters, gate, share):
            if peers.rank == 1 and counters.frames == 7:
                raise MemoryError("no room")

        Member(peers, config_of(), **THREE).run(logs, deltas=tmp_path / "job", progress=fails)

    first, second = together(2, work)
    assert (type(first), str(first), str(second)) == (MemoryError, "process 1: no room", "no room")
    assert [each["step"][0].as_py() for each in batches_of(tmp_path / "job")][-1] == 2


def test_a_stage_is_pulled_by_all_and_comes_out_at_the_first(logs):
    """After a run without deltas, whose last rows may have been another process's."""

    def staged(engine, **order):
        engine.run(logs, limit=3, **order)
        before = follower_of(engine)
        followed = follow(before, engine.stage(logs, slots=True, numbered=True, **order))
        return followed.num_applied, equal(followed.tables, tables_of(engine))

    wanted = staged(ps.Engine(config_of(), **THREE), merge="round")
    of_job = all_well(together(2, lambda peers: staged(Member(peers, config_of(), **THREE))))
    assert of_job == [wanted, (0, False)]
    assert wanted == (7, True)
