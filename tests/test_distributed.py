"""Many processes: the same bits as one, whatever the number of processes and devices. Members are threads here."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import DIM, ROWS, batch, commits, config_of, engine_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ipc import write
from jobs import THREE, all_well, alone, errors_of, made_of, replayed, together

import penstock as ps
from penstock.config import optimizers as o
from penstock.config.tables import TableConfig
from penstock.distributed.member import Member
from penstock.distributed.shares import Share
from penstock.errors import StateError

WORDS = 1083


@pytest.fixture
def logs(tmp_path):
    return [write(tmp_path / f"{n}.arrows", [batch(step, n) for step in range(8)]) for n in range(3)]


# ---- one state hash


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_job_ends_as_one_process_does_and_says_the_same(logs, count):
    wanted, report = alone(config_of(), logs, THREE, flush=True)
    results = replayed(count, config_of(), logs, engine=THREE, flush=True)
    assert {digest for digest, _ in results} == {wanted}
    for _, got in results:
        for what in (
            "rows",
            "frames",
            "steps",
            "stale",
            "pending",
            "tables",
            "verified",
            "unverified",
            "notes",
            "dropped",
        ):
            assert getattr(got, what) == getattr(report, what), what


@pytest.mark.parametrize("strategy", ["MOD", "DIV"])
def test_the_hash_depends_on_no_number_of_devices_and_processes(logs, mesh_of, strategy):
    config = with_strategy(config_of(), strategy)
    hashes = {alone(config, logs, THREE | {"mesh": mesh_of(devices)})[0] for devices in (1, 2, 3, 4, 8)}
    for count, devices in ((1, 3), (2, 1), (2, 2), (2, 4), (3, 2)):
        hashes |= {digest for digest, _ in replayed(count, config, logs, mesh_of(devices), THREE)}
    assert len(hashes) == 1


@pytest.mark.parametrize("strategy", ["MOD", "DIV"])
def test_one_hash_on_the_real_log(shared, mesh_of, strategy):
    source = shared("realdata/shakespeare_words.arrows")
    tables = [TableConfig(WORDS, 8, name=name) for name in ("center", "context")]
    config = with_strategy(ps.EmbeddingConfig.from_tables(tables, o.Adagrad(0.1)), strategy)
    how = {"columns": {"gradient": "grad"}}
    hashes = {alone(config, source, {"mesh": mesh_of(devices)}, **how)[0] for devices in (1, 2, 3, 4, 8)}
    hashes |= {digest for devices in (1, 2) for digest, _ in replayed(2, config, source, mesh_of(devices), **how)}
    assert len(hashes) == 1


@given(
    st.lists(st.lists(st.lists(st.integers(0, 6), max_size=6), max_size=4), min_size=1, max_size=3),
    st.integers(1, 3),
    st.sampled_from(["MOD", "DIV"]),
    st.sampled_from(["mean", "sum"]),
    st.booleans(),
)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_hash_on_any_log(mesh_of, logs, num_required, strategy, reduction, accumulate):
    """Ids of a table of seven rows, several times in a frame; frames without rows of some process are likely."""
    optimizer = o.Adam(0.1, lazy_adam=False) if accumulate else o.RowWiseAdagrad(0.1, use_gradient_accumulation=False)
    table = TableConfig(7, 2, name="t", optimizer=optimizer)
    config = with_strategy(ps.EmbeddingConfig.from_tables([table]), strategy)
    engine = {"num_required": num_required, "reduction": reduction}
    hashes = {
        alone(config, [made_of(log) for log in logs], engine | {"mesh": mesh_of(devices)})[0] for devices in (1, 3)
    }
    for count in (2, 3):
        # Batches are iterators: each member is given its own.
        hashes |= {d for d, _ in replayed(count, config, lambda: [made_of(log) for log in logs], engine=engine)}
    assert len(hashes) == 1


def with_strategy(config, strategy):
    message = config.to_engine_proto()
    message.tpu_embedding_configuration.sharding_strategy = {"DIV": 0, "MOD": 1}[strategy]
    return ps.EmbeddingConfig.from_proto(message)


@pytest.mark.parametrize(
    ("strategy", "before", "after"), [("MOD", (2, 1), (1, 3)), ("MOD", (1, 1), (2, 2)), ("DIV", (3, 1), (2, 4))]
)
def test_rows_of_16_bits_are_rounded_alike_whoever_holds_them(logs, mesh_of, tmp_path, strategy, before, after):
    """Half of the run by so many processes of so many devices, the rest by others."""
    config = with_16_bits(with_strategy(config_of(optimizer=o.SGD(0.1)), strategy), "user")
    wanted, _ = alone(config, logs, THREE)
    folder, (count, devices) = tmp_path / "c", before
    replayed(count, config, logs, mesh_of(devices), THREE, limit=13, checkpoint=folder)
    count, devices = after

    def work(peers):
        member = Member.restored(peers, folder, mesh_of(devices))
        member.run(logs, resume=True)
        return member.state_hash()

    assert all_well(together(count, work)) == [wanted] * count


def with_16_bits(config, name):
    message = config.to_engine_proto()
    table = next((table for table in message.table if table.name == name), None) or message.table.add(name=name)
    table.storage_dtype = 2
    return ps.EmbeddingConfig.from_proto(message)


# ---- shares


@given(st.integers(1, 60), st.integers(1, 9), st.booleans())
def test_every_row_has_one_owner_and_one_number_there(rows, count, mod):
    ids = np.arange(rows)
    shares = [Share(rows, mod, rank, count) for rank in range(count)]
    assert sum(share.num_rows for share in shares) == rows
    held = [share.ids(np.arange(share.num_rows)) for share in shares]
    assert sorted(itertools.chain(*(of.tolist() for of in held))) == ids.tolist()
    for share, of in zip(shares, held, strict=True):
        places, numbers = share.mine(ids)
        assert places.tolist() == sorted(of.tolist())
        assert share.ids(numbers).tolist() == places.tolist()
        drawn = share.drawn(lambda first, number: np.arange(first, first + number)[:, None].astype(np.float32))
        assert drawn(0, share.held_rows)[: share.num_rows, 0].tolist() == of.tolist()


def test_a_table_smaller_than_the_job_is_fine():
    config = ps.EmbeddingConfig.from_tables([TableConfig(2, 2, name="t", optimizer=o.SGD(0.1))])
    wanted, _ = alone(config, [made_of([[0, 1, 1]])])
    assert {d for d, _ in replayed(4, config, lambda: [made_of([[0, 1, 1]])])} == {wanted}


def test_rows_looked_at_are_the_same_everywhere(logs):
    engine = engine_of()
    engine.run(logs, merge="round")

    def work(peers):
        member = Member(peers, config_of(), **THREE)
        member.run(logs)
        return member.lookup("user", [5, 1, 5, ROWS - 1]), member.retrieve_parameters("item")["parameters"]

    for rows, whole in all_well(together(2, work)):
        assert rows.tobytes() == engine.lookup("user", [5, 1, 5, ROWS - 1]).tobytes()
        assert whole.tobytes() == engine.retrieve_parameters("item")["parameters"].tobytes()


def test_tables_are_written_by_the_first_and_read_by_all(logs, tmp_path):
    engine = engine_of()
    engine.run(logs, merge="round")

    def work(peers):
        member = Member(peers, config_of(), **THREE)
        member.run(logs)
        written = member.write_tables(tmp_path / "out")
        peers.gather("written", None)
        again = Member(peers, config_of(), seed=7)
        again.read_tables(tmp_path / "out")
        again.gate.set_global_step(member.global_step)
        return [path.name for path in written], again.state_hash()

    results = all_well(together(2, work))
    assert [names for names, _ in results] == [["user.parquet", "item.parquet"], []]
    assert {digest for _, digest in results} == {engine.state_hash()}


# ---- commits


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2)])
def test_any_number_of_processes_goes_on_where_another_stopped(logs, mesh_of, tmp_path, before, after):
    wanted, _ = alone(config_of(), logs, THREE, flush=True)
    folder = tmp_path / "c"
    replayed(before, config_of(), logs, engine=THREE, limit=13, checkpoint=folder, every=2)

    def work(peers):
        member = Member.restored(peers, folder, mesh_of(2))
        report = member.run(logs, checkpoint=folder, every=1, resume=True, flush=True)
        return member.state_hash(), report.skipped

    assert all_well(together(after, work)) == [(wanted, 13)] * after
    assert ps.Engine.restore(folder).state_hash() == wanted


def test_every_process_writes_its_own_file_and_there_is_one_manifest(logs, tmp_path):
    folder = tmp_path / "c"
    replayed(2, config_of(), logs, engine=THREE, checkpoint=folder)
    assert commits(folder) == ["00000001-0of2.base", "00000001-1of2.base", "00000001.commit"]
    (folder / "00000001-1of2.base").unlink()
    with pytest.raises(StateError, match=r"00000001-1of2\.base: is missing"):
        ps.Engine.restore(folder)


def test_frames_that_are_not_accumulated_and_wait_behind_the_gate_are_kept(logs, mesh_of, tmp_path):
    optimizer = o.Adagrad(0.1, use_gradient_accumulation=False)
    config = config_of(more=[TableConfig(5, DIM, name="small", optimizer=optimizer)])
    rng = np.random.default_rng(3)
    small = pa.RecordBatch.from_pydict(
        {
            "table": ["small"] * 3,
            "step": pa.array([0] * 3, pa.int64()),
            "contributor": ["w0"] * 3,
            "id": pa.array([0, 2, 0], pa.int64()),  # none of process 1's
            "gradient": pa.array(rng.standard_normal((3, DIM)).tolist(), pa.list_(pa.float32())),
        }
    )
    source = write(tmp_path / "s.arrows", [batch(0, 0), small.slice(0, 3), batch(0, 1), batch(0, 2)])
    wanted, _ = alone(config, source, {"num_required": 4})
    folder = tmp_path / "c"
    replayed(2, config, source, engine={"num_required": 4}, limit=2, checkpoint=folder)
    for count in (1, 2):

        def work(peers):
            member = Member.restored(peers, folder)
            member.run(source, resume=True)
            return member.state_hash()

        assert set(all_well(together(count, work))) == {wanted}


def test_a_commit_that_one_cannot_write_fails_for_all(logs, tmp_path, monkeypatch):
    from penstock.distributed import commits as shared

    def fails(self):
        if self._peers.rank == 1:
            raise OSError(28, "No space left on device", "somewhere")
        return written(self)

    written = shared.SharedWriter._written
    monkeypatch.setattr(shared.SharedWriter, "_written", fails)
    for error in errors_of(2, config_of(), logs, THREE, checkpoint=tmp_path / "c"):
        assert isinstance(error, OSError)
        assert "No space left on device" in str(error)
    assert not list((tmp_path / "c").glob("*.commit"))


def test_a_folder_that_is_not_shared_is_an_error(logs, tmp_path):
    def work(peers):
        Member(peers, config_of(), **THREE).run(logs, checkpoint=tmp_path / str(peers.rank))

    for error in together(2, work):
        assert isinstance(error, StateError)
        assert (
            "process 1 finds nothing there and process 0 no commit; the folder must be one that all processes share"
            in str(error)
        )
