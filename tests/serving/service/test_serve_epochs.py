"""A service that goes back: to an older commit, to a backup, to a copy. Its readers notice, and no row diverges."""

import errno
import shutil
import signal

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from cli import outcome
from limits import HANG_S, in_thread, until
from services import DIM, Process, client_of, config_of, frame, free_port, replayed, service_of

import penstock as ps
from penstock.api.live_reads import LiveReads
from penstock.checkpoint.store import Folder
from penstock.serving.flight import connect
from penstock.serving.flight.connection import Address

CONFIG = config_of()
FRAMES = [frame(number) for number in range(12)]
OTHER = [frame(number, seed=1) for number in range(12)]


def serving(folder, **arguments):
    """A service that resumes the folder, if it has a commit."""
    resume = bool(Folder(folder).numbers())
    engine = ps.Engine.restore(folder) if resume else ps.Engine(config_of())
    return service_of(engine, folder, resume=resume, **arguments)


def push(client, frames, name="w0"):
    """Put frames, and commit."""
    client.put(frames, name)
    client.checkpoint()


def go_back(folder, step):
    """Remove the commits after a step, as the error about a damaged one advises."""
    while (newest := Folder(folder).newest()).contents["global_step"] > step:
        (folder / f"{newest.number:08}.commit").unlink()
    assert newest.contents["global_step"] == step


def versions_of(client):
    """The version of every reader: of a table, and of the last delta."""
    return [client.table("user").version, *[delta.version for delta in client.deltas()][-1:]]


@pytest.fixture
def at_six(tmp_path):
    """A folder with commits of steps 3 and 6, and the positions of readers of step 6."""
    folder = tmp_path / "c"
    with serving(folder) as service, client_of(service) as client:
        push(client, FRAMES[:3])
        push(client, FRAMES[3:6])
        versions = versions_of(client)
    assert [version.step for version in versions] == [6, 6]
    return folder, versions


def test_readers_fetch_tables_that_are_trained_from_a_step_on(tmp_path):
    config = config_of()
    frozen = ps.TableConfig(8, DIM, name="frozen", optimizer=ps.Adagrad(0.5), trainable=False, until_step=2)
    (table,) = config.tables
    user = ps.TableConfig(table.vocabulary_size, DIM, name="user", optimizer=table.optimizer)
    config = ps.EmbeddingConfig.from_tables([user, frozen])
    with service_of(ps.Engine(config), tmp_path / "c") as service, client_of(service) as client:
        before = client.table("frozen")
        for number in range(4):
            push(client, [named(FRAMES[number], "frozen" if number else "user")])
            assert (number < 1) == (service.engine.slots("frozen") == {})
        with pytest.raises(ps.DeltasGoneError, match="the tables of this service have changed at step 2; read the t"):
            list(client.deltas(before.version))
        after = client.table("frozen")
        assert after.version.step == 4
        assert (after.rows != before.rows).any()
        push(client, [named(FRAMES[4], "frozen")])
        (delta,) = client.deltas(after.version)
        assert delta.version.follows(after.version)
    with serving(tmp_path / "c") as service, client_of(service) as client:
        assert list(client.deltas(delta.version)) == []
        assert service.engine.slots("frozen").keys() == {"accumulators"}


def named(batch, table):
    ids = batch.column("id").to_numpy() % 8
    columns = {"id": ids, "gradient": batch.column("gradient"), "table": [table] * len(ids)}
    return pa.record_batch(columns)


def test_a_reader_ahead_of_a_service_that_went_back_gets_an_error_and_others_continue(at_six):
    folder, versions = at_six
    with serving(folder) as service, client_of(service) as client:  # no step was lost: every reader continues
        assert [list(client.deltas(version)) for version in versions] == [[], []]
    go_back(folder, 3)
    with serving(folder) as service, client_of(service) as client:
        at_three = client.table("user")
        push(client, OTHER[:3])
        assert service.engine.global_step == 6
        for version in versions:
            with pytest.raises(ps.DeltasGoneError, match="restored from step 3 and has other steps since then"):
                list(client.deltas(version))
        (delta,) = client.deltas(at_three.version)
        assert (delta.since, delta.version) == (3, service.sequencer.streams.lineage.ahead(6))
        assert not delta.version.follows(at_three.version)  # of another epoch
        rows = at_three.rows.copy()
        for batch in delta.batches:
            rows[batch.column("id").to_numpy()] = batch.column("row").flatten().to_numpy().reshape(-1, DIM)
        np.testing.assert_array_equal(rows, np.asarray(service.engine.table("user")))
        np.testing.assert_array_equal(rows, np.asarray(replayed(FRAMES[:3] + OTHER[:3]).table("user")))


@pytest.mark.parametrize("lineage", [True, False])
def test_a_reader_that_follows_over_the_restart_gets_the_error(lineage, tmp_path):
    folder, address = tmp_path / "c", Address("127.0.0.1", free_port(), False)
    with connect(address.uri, patience_s=HANG_S) as reader:
        seen = []

        def follow():
            snapshot = reader.table("user")
            deltas = reader.deltas(snapshot.version if lineage else ps.Version("3"), follow=True)
            with pytest.raises(ps.DeltasGoneError, match="restored from step 3"):
                next(delta for delta in deltas if seen.append(delta.version.step) or delta.version.step > 6)

        with serving(folder, address=address) as service, client_of(service) as client:
            push(client, FRAMES[:3])
            done = in_thread(follow)
            until(lambda: service.log._num_following)
            push(client, FRAMES[3:6])
            until(lambda: seen == [6])
        go_back(folder, 3)
        with service_of(ps.Engine.restore(folder), folder, resume=True) as service, client_of(service) as client:
            push(client, OTHER[:3])  # to the reader's step, before it can reconnect
        with serving(folder, address=address) as service, client_of(service) as client:
            push(client, OTHER[3:5])
            done()
    assert seen == [6]


def test_a_reader_without_a_delta_yet_also_notices(tmp_path):
    folder, address = tmp_path / "c", Address("127.0.0.1", free_port(), False)
    with connect(address.uri, patience_s=HANG_S) as reader:
        with serving(folder, address=address) as service, client_of(service) as client:
            push(client, FRAMES[:3])
            push(client, FRAMES[3:6])
        with serving(folder, address=address) as service:

            def follow():
                with pytest.raises(ps.DeltasGoneError):
                    next(reader.deltas(follow=True))

            done = in_thread(follow)
            until(lambda: service.log._num_following)
        go_back(folder, 3)
        with serving(folder, address=address) as service, client_of(service) as client:
            push(client, OTHER[:5])
            done()


def test_a_backup_restored_over_the_folder(at_six, tmp_path):
    folder, _ = at_six
    shutil.copytree(folder, tmp_path / "backup")
    with serving(folder) as service, client_of(service) as client:
        push(client, FRAMES[6:9])
        versions = versions_of(client)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    with serving(folder) as service, client_of(service) as client:
        push(client, OTHER[6:9])
        assert service.engine.global_step == 9
        for version in versions:
            with pytest.raises(ps.DeltasGoneError, match="of an epoch that is not in the history of this service"):
                list(client.deltas(version))


def test_two_copies_started_at_once_have_different_epochs(at_six, tmp_path):
    folder, (version, _) = at_six
    shutil.copytree(folder, tmp_path / "copy")
    with (
        serving(folder) as server,
        serving(tmp_path / "copy") as other,
        client_of(server) as client,
        client_of(other) as other_client,
    ):
        push(client, FRAMES[6:9])
        push(other_client, OTHER[6:9])
        here, there = (each.status().version for each in (client, other_client))
        assert (here.lineage, here.step) == (there.lineage, there.step)
        assert here != there
        assert not here.follows(there)
        assert not there.follows(here)
        for service in (client, other_client):  # both continue from the step that both have
            assert [delta.version.step for delta in service.deltas(version)] == [9]
        for there, here in ((client, other_client), (other_client, client)):
            for elsewhere in versions_of(there):
                with pytest.raises(ps.DeltasGoneError, match="of an epoch that is not in the history"):
                    list(here.deltas(elsewhere))


def test_a_replay_that_continues_the_folder_of_a_service_begins_an_epoch(at_six):
    folder, versions = at_six
    go_back(folder, 3)
    engine = ps.Engine.restore(folder)
    engine.run(iter(OTHER[:3]), checkpoint=folder, resume=True)
    assert engine.global_step == 6
    with serving(folder) as service, client_of(service) as client:
        assert service.engine.global_step == 6
        for version in versions:
            with pytest.raises(ps.DeltasGoneError, match="restored from step 3"):
                list(client.deltas(version))


def test_killed_before_the_first_commit_a_follower_continues(tmp_path, config):
    listen = f"grpc://127.0.0.1:{free_port()}"
    serve = (config, "--listen", listen, "--checkpoint", tmp_path / "c", "--resume")
    with Process(*serve) as service, connect(listen, patience_s=HANG_S) as client:
        snapshot = client.table("user")
        service.end(signal.SIGKILL)
        with Process(*serve):
            assert client.status().version.lineage == snapshot.version.lineage
            push(client, FRAMES[:2])
            assert [d.version.step for d in client.deltas(snapshot.version)] == [2]


# ---- the start


def test_a_start_commits_no_row_again(tmp_path):
    folder = tmp_path / "c"
    with serving(folder) as service, client_of(service) as client:
        push(client, FRAMES[:6])
    base = max(path.stat().st_size for path in folder.iterdir())
    with serving(folder):
        newest = Folder(folder).newest()
    assert newest.files[-1].num_bytes < 1000 < base
    assert newest.contents["positions"]["epochs"][-1][1] == 6


def test_twenty_starts_in_a_row_keep_the_earlier_commits(tmp_path):
    folder = tmp_path / "c"
    with serving(folder) as service, client_of(service) as client:
        for first in range(0, 9, 3):
            push(client, FRAMES[first : first + 3])
    before = Folder(folder).numbers()
    for _ in range(20):
        with serving(folder) as service:
            assert len(service.sequencer.streams.lineage.epochs) == 2
    kept = Folder(folder)
    assert kept.numbers()[:-1] == before
    assert len(kept.newest().files) == len(kept.load(before[-1]).files) + 1  # of the starts, only the last one
    assert len(list(folder.iterdir())) == 2 * len(kept.numbers()) + 2  # and the base, and .lock
    for number in kept.numbers():
        kept.checked(kept.load(number))
    with serving(folder) as service, client_of(service) as client:
        push(client, FRAMES[9:])
    assert ps.Engine.restore(folder).state_hash() == replayed(FRAMES).state_hash()
    go_back(folder, 6)
    assert ps.Engine.restore(folder).state_hash() == replayed(FRAMES[:6]).state_hash()


def test_a_start_that_cannot_commit_is_exit_6(tmp_path, config, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Folder, "publish_commit", full)
    code, _, text = outcome(capsys, "serve", config, "--checkpoint", tmp_path / "c", "--resume")
    assert (code, text.count("\n")) == (6, 1), text
    assert "cannot write: no space left on device" in text
    monkeypatch.undo()
    with serving(tmp_path / "c"):  # it was unlocked
        pass


def test_a_start_that_cannot_tell_the_readers_of_its_files_unlocks_the_checkpoint(tmp_path, monkeypatch):
    def full(reads):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LiveReads, "begin_epoch", full)
    engine = ps.Engine(config_of(), shared=tmp_path / "shared")
    with pytest.raises(OSError, match="No space"), service_of(engine, tmp_path / "c"):
        pass
    with serving(tmp_path / "c"):
        pass


# ---- what readers give and get


def test_wrong_types_are_usage_errors():
    with service_of() as service, client_of(service) as client:
        for wrong in (0, "0", "3-x", np.int64(0)):
            with pytest.raises(ps.UsageTypeError, match="since: expected the version of a table"):
                list(client.deltas(wrong))
        for wrong in (3, 2.5, "", "3-x", "a-b-c-1", "a--1", "9" * 20):
            with pytest.raises(flight.FlightServerError, match="expected a version, such as"):
                client.connection.get({"deltas": {"since": wrong}}).read_all()
        assert list(client.deltas(ps.Version("0"))) == []


def test_status_tables_and_lookups_name_the_version(at_six):
    folder, _ = at_six
    with serving(folder) as service, client_of(service) as client:
        before = client.status()
        assert before["epochs"][0] == ["0", 0]
        assert before.version == client.table("user").version == service.engine.version
        assert (before.version.epoch, before.version.step) == ("0", 6)  # of the epoch before
        push(client, FRAMES[6:8])
        status = client.status()
        assert (status.version.epoch, status.version.step) == (before["epochs"][1][0], 8)
        (delta,) = client.deltas(before.version)
        looked_up = client.lookup({"user": [1]})
        assert {client.table("user").version, delta.version, looked_up.version} == {status.version}
        assert client.lookup("user", [1]).tolist() == looked_up["user"].tolist()
        assert ps.Version(str(status.version)) == status.version == service.engine.version
