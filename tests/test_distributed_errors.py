"""Errors and quarantines of a job of several processes. Members are threads here."""

import pyarrow as pa
import pytest
from checkpoints import ROWS, batch, config_of, engine_of
from ipc import write
from jobs import THREE, all_well, alone, errors_of, made_of, replayed, together

import penstock as ps
from penstock.config import optimizers as o
from penstock.config.tables import TableConfig
from penstock.distributed.member import Member
from penstock.errors import ConfigError, InputError, PeerError, UsageError


@pytest.fixture
def logs(tmp_path):
    return [write(tmp_path / f"{n}.arrows", [batch(step, n) for step in range(8)]) for n in range(3)]


def test_a_bad_row_stops_everybody_after_the_frames_before_it_and_those_are_committed(logs, tmp_path):
    bad = batch(4, 1).set_column(3, "id", pa.array([ROWS] * 40))
    logs[1] = write(tmp_path / "bad.arrows", [*(batch(step, 1) for step in range(4)), bad])
    folder = tmp_path / "c"
    for error in errors_of(2, config_of(), logs, THREE, checkpoint=folder):
        assert isinstance(error, InputError)
        assert f"{logs[1]}: batch 4, row 0, column 'id': expected 0 <= id < {ROWS}" in str(error)
    one = engine_of()
    with pytest.raises(InputError):
        one.run(logs, merge="round")
    restored = ps.Engine.restore(folder)
    assert restored.state_hash() == one.state_hash()
    assert restored.gate.num_accumulated == one.gate.num_accumulated == 1


def test_dropped_rows_are_counted_for_all_and_the_first_is_named(logs, tmp_path):
    bad = batch(2, 1).set_column(3, "id", pa.array([ROWS] * 40))
    logs[1] = write(tmp_path / "bad.arrows", [batch(0, 1), batch(1, 1), bad])
    wanted, report = alone(config_of(), logs, THREE, on_bad_row="drop")
    for digest, got in replayed(2, config_of(), logs, engine=THREE, on_bad_row="drop"):
        assert (digest, got.dropped, got.notes) == (wanted, report.dropped, report.notes)


def test_a_quarantine_is_written_by_the_first_and_is_that_of_one_process(logs, tmp_path):
    bad = batch(2, 1).set_column(3, "id", pa.array([ROWS] * 40))
    logs[1] = write(tmp_path / "bad.arrows", [batch(0, 1), bad, batch(5, 1)])
    alone(config_of(), logs, THREE, on_bad_row=f"quarantine={tmp_path / 'one.arrows'}")
    replayed(2, config_of(), logs, engine=THREE, on_bad_row=f"quarantine={tmp_path / 'two.arrows'}")
    one, two = (pa.ipc.open_stream(tmp_path / name).read_all() for name in ("one.arrows", "two.arrows"))
    assert one.num_rows == 40
    assert two.equals(one)


def test_missing_learning_rates_are_an_error_in_every_process(tmp_path):
    table = TableConfig(7, 2, name="t", optimizer=o.SGD(ps.DynamicLearningRate(0)))
    for error in errors_of(2, ps.EmbeddingConfig.from_tables([table]), lambda: [made_of([[1]])]):
        assert isinstance(error, ConfigError)


def test_one_that_fails_by_itself_ends_the_others_with_its_name():
    def work(peers):
        if peers.rank == 1:
            raise MemoryError("no room")
        peers.gather("something", 1)

    first, second = together(2, work)
    assert (type(first), str(first), str(second)) == (MemoryError, "process 1: no room", "no room")


def test_one_that_is_gone_without_a_word_is_named():
    def work(peers):
        if peers.rank == 2:
            for connection in peers._sockets.values():
                connection.shutdown(2)
            raise SystemExit
        peers.gather("something", 1)

    results = together(3, work)
    for error in results[:2]:
        assert isinstance(error, PeerError)
        assert "process 2 of 3 is gone" in str(error)


def test_members_that_do_different_things_are_told_apart():
    def work(peers):
        peers.gather(f"thing {peers.rank}", 1)

    for error in together(2, work):
        assert isinstance(error, PeerError)
        assert "'thing " in str(error)


def test_what_needs_one_process_is_refused():
    def work(peers):
        member = Member(peers, config_of())
        for refused in (
            lambda: member.apply({}),
            lambda: member.table("user"),
            lambda: member.run([], merge="step"),
        ):
            with pytest.raises(UsageError):
                refused()

    all_well(together(2, work))
