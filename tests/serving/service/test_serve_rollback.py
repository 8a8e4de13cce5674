"""A rollback of a service: one numbered delta for all readers, durable before it is answered, for operators only."""

import shutil
from contextlib import suppress

import pyarrow as pa
import pytest
from cli import outcome
from faults.operations import full_disk
from limits import in_thread, until
from services import client_of, service_of
from stores import STORES, config_of, frame, open_store, rows_of

import penstock as ps
from penstock.base.filesystem import atomic_files
from penstock.checkpoint.rollbacks import roll_back_folder

FRAMES = [frame(step) for step in range(60)]


def push(client, numbers, name="w0"):
    """Put frames, and commit."""
    client.put([FRAMES[number] for number in numbers], name, first=client.position(name) + 1)
    client.checkpoint()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "c"


@pytest.fixture
def serving(folder):
    """A service at step 24, whose tag "good" names step 12, and the rows at both."""
    with service_of(ps.Engine(config_of()), folder) as service, client_of(service) as client:
        push(client, range(12))
        service.engine.tag("good")
        service.good = rows_of(service.engine)
        push(client, range(12, 24))
        yield service, client


def stepped(number):
    """A frame that is stale once the service has taken more steps."""
    steps = pa.array([number] * FRAMES[number].num_rows, pa.int64())
    return FRAMES[number].append_column("step", steps)


def follow(capsys, service, store, *flags):
    code, printed, text = outcome(capsys, "follow", service.address.uri, "--into", store.target, "--once", *flags)
    assert code == 0, text
    return printed


@pytest.mark.parametrize("store", STORES)
@pytest.mark.promise("A rollback has the bits of its version, and followers apply it like a step")
def test_a_follower_just_applies_a_rollback(store, serving, tmp_path, capsys, caplog):
    service, client = serving
    with open_store(store, tmp_path) as target:
        follow(capsys, service, target)
        push(client, range(24, 26))
        answer = client.rollback("good")
        assert answer == {"global_step": 27, "to_step": 12, "rolled_back": 0}
        assert "rolled_back step=27 to=12 frames=0" in [record.getMessage() for record in caplog.records]
        assert rows_of(service.engine) == service.good
        done = follow(capsys, service, target)
        assert (done["full_copies"], done["deltas"], done["step"]) == (0, 2, 27)
        assert target.read() == service.good
        push(client, range(30, 34))
        done = follow(capsys, service, target)
        assert (done["full_copies"], done["step"]) == (0, 31)
        assert target.read() == rows_of(service.engine)


def test_a_follower_that_was_away_gets_the_rollback_or_all_tables(serving, tmp_path, capsys):
    service, client = serving
    with open_store("lmdb", tmp_path) as target:
        follow(capsys, service, target)
        client.rollback("good")
        push(client, range(24, 30))
        client.rollback(24)
        assert follow(capsys, service, target)["full_copies"] == 0
        assert target.read() == rows_of(service.engine)
        service.log.max_bytes = 100
        client.rollback("good")
        assert follow(capsys, service, target)["full_copies"] == 1
        assert target.read() == service.good


def test_a_rollback_is_a_delta_between_those_of_steps(serving):
    _, client = serving
    taken = client.table("item")
    push(client, range(24, 27))
    client.rollback("good")
    push(client, range(27, 29))
    deltas = list(client.deltas(taken.version))
    assert [(delta.since, delta.version.step) for delta in deltas] == [(24, 27), (27, 28), (28, 30)]


def test_no_frame_is_applied_twice_and_older_steps_are_stale(folder):
    with service_of(ps.Engine(config_of()), folder) as service, client_of(service) as client:
        push(client, range(6))
        service.engine.tag("good")
        with client.producer("w1") as producer:
            for step in range(6, 9):
                producer.send(stepped(step))
            until(lambda: service.engine.global_step == 9)
            client.rollback("good")
            for step in (9, 10):
                producer.send(stepped(step))
        assert (producer.acked.position, producer.acked.applied, producer.acked.stale) == (5, 4, 1)
        assert service.engine.global_step == 11
        assert client.position("w0") == 6
        again = client.put([FRAMES[number] for number in range(6)], "w0", first=1)
        assert (again.position, service.engine.global_step) == (6, 11)


def test_the_command_rolls_a_service_back(serving, folder, refused, capsys):
    service, _ = serving
    address = service.address.uri
    assert "no tag 'god'; did you mean 'good'?" in refused(5, "rollback", address, "--to", "god")
    code, done, text = outcome(capsys, "rollback", address, "--to", "good")
    assert (code, done) == (0, {"global_step": 25, "to_step": 12, "rolled_back": 0}), text
    assert text == f"rolled back  {address}: step 25, with the rows of step 12\n"
    assert "another run is writing checkpoints there" in refused(2, "rollback", folder, "--to", "good")


def test_a_rollback_is_durable_once_it_is_answered_and_resumed(serving, folder):
    service, client = serving
    client.rollback("good")
    restored = ps.Engine.restore(folder)
    assert (restored.global_step, rows_of(restored)) == (25, service.good)
    assert client.status()["committed_step"] == 25


def test_a_service_whose_disk_is_full_ends_and_resumes_before_the_rollback(folder, monkeypatch):
    with suppress(OSError), service_of(ps.Engine(config_of()), folder) as service, client_of(service) as client:
        push(client, range(6))
        service.engine.tag("good")
        push(client, range(6, 9))
        before = rows_of(service.engine)
        monkeypatch.setattr(atomic_files, "operations", full_disk())
        with pytest.raises(ps.ServiceError, match=r"the commit failed: .*No space left"):
            client.rollback("good")
        monkeypatch.undo()
    assert isinstance(service.sequencer.error, OSError)
    with service_of(ps.Engine.restore(folder), folder, resume=True) as service, client_of(service) as client:
        assert (service.engine.global_step, rows_of(service.engine)) == (9, before)
        assert client.rollback("good")["global_step"] == 10


def test_a_service_that_resumes_a_rolled_back_folder_sends_readers_the_tables(folder, tmp_path, capsys):
    with service_of(ps.Engine(config_of()), folder) as service, client_of(service) as client:
        push(client, range(6))
        service.engine.tag("good")
        good = rows_of(service.engine)
        push(client, range(6, 9))
        taken = client.table("item")
    code, done, text = outcome(capsys, "rollback", folder, "--to", "good")
    assert (code, done) == (0, {"global_step": 10, "to_step": 6, "rolled_back": 0}), text
    with service_of(ps.Engine.restore(folder), folder, resume=True) as service, client_of(service) as client:
        with pytest.raises(ps.DeltasGoneError, match="read the tables again"):
            list(client.deltas(taken.version))
        assert rows_of(service.engine) == good
        assert client.position("w0") == 9


def test_a_reader_of_a_step_that_went_back_does_not_take_it_for_that_of_a_rollback(folder, tmp_path):
    """The rollback of an older copy takes the number of a step that a reader has already, with other rows."""
    with service_of(ps.Engine(config_of()), folder) as service, client_of(service) as client:
        push(client, range(6))
        service.engine.tag("good")
        push(client, range(6, 9))
        copy = shutil.copytree(folder, tmp_path / "copy")
        push(client, [9])
        taken = client.table("item")
        assert taken.version.step == 10
    assert roll_back_folder(copy, "good").step == 10
    engine = ps.Engine.restore(copy)
    with service_of(engine, copy, resume=True) as service, client_of(service) as client:
        assert client.status()["global_step"] == taken.version.step
        with pytest.raises(ps.DeltasGoneError, match="read the tables again"):
            list(client.deltas(taken.version))


def test_a_rollback_drops_the_frames_in_the_gate(folder):
    engine = ps.Engine(config_of(), num_required=4)
    small = [frame(number, keys=[number]) for number in range(14)]
    with service_of(engine, folder) as service, client_of(service) as client:
        client.put(small[:8], "w0")
        engine.tag("good")
        client.put(small, "w0", first=1)
        assert client.status()["pending"] == 2
        assert client.rollback("good") == {"global_step": 4, "to_step": 2, "rolled_back": 2}
        status = client.status()
        assert (status["pending"], status["rolled_back"], status["frames"], status["steps"]) == (0, 2, 14, 3)


def test_readers_follow_through_a_rollback_while_producers_push(folder):
    """The reader is connected all along, and another producer pushes at every moment of several rollbacks."""
    with service_of(ps.Engine(config_of()), folder, every=2) as service, client_of(service) as client:
        push(client, range(6))
        service.engine.tag("good")
        seen, ended = [], []

        def read():
            with client_of(service) as reader:
                taken = reader.table("item")
                rows, deltas = (
                    taken.rows.copy(),
                    reader.deltas(taken.version, follow=True),
                )
                seen.append(taken.version.step)
                while ended != seen[-1:]:
                    delta = next(deltas)
                    assert delta.since <= seen[-1] < delta.version.step
                    for row in (row for part in delta.batches for row in part.to_pylist()):
                        if row["table"] == "item":
                            rows[row["id"]] = row["row"]
                    seen.append(delta.version.step)
            return rows

        def trickle():
            with client_of(service) as producer:
                for number in range(6, 46):
                    producer.put([FRAMES[number]], "w1", first=producer.position("w1") + 1)

        reading, pushing = in_thread(read), in_thread(trickle)
        step = service.engine.global_step
        for _ in range(4):
            until(lambda step=step: service.engine.global_step > step)  # else the rollback changes no row
            step = client.rollback("good")["global_step"]
            until(lambda step=step: seen[-1:] >= [step])
        pushing()
        ended.append(client.rollback("good")["global_step"] + 1)
        push(client, [50])
        assert reading().tobytes() == client.table("item").rows.tobytes()
        assert client.position("w1") == 40
        status = client.status()
        assert status["global_step"] == status["steps"] + 5


def test_a_replica_has_the_rows_of_a_rollback(serving, tmp_path, capsys):
    service, client = serving
    with open_store("shared", tmp_path) as target:
        follow(capsys, service, target)
        with ps.Reader(target.path) as reader:
            client.rollback("good")
            follow(capsys, service, target)
            items = reader.lookup("item", list(service.good["item"]), consistent=True)
            assert [row.tobytes() for row in items] == list(service.good["item"].values())


def test_a_service_without_a_checkpoint_and_unknown_versions_are_refused(serving):
    _, client = serving
    with (
        service_of(ps.Engine(config_of())) as bare,
        client_of(bare) as other,
        pytest.raises(ps.UsageError, match="this service has no checkpoint, so no earlier commit"),
    ):
        other.rollback("good")
    with pytest.raises(ps.StateError, match="no tag 'god'; did you mean 'good'"):
        client.rollback("god")
    with pytest.raises(ps.UsageError, match="rollback: expected a tag or a step, got None"):
        client.connection.act_once("rollback")
    assert client.status()["global_step"] == 24
