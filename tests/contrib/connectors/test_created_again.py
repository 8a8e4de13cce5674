"""Streams and topics that were deleted and created again: no position in the former one continues in the latter."""

from contextlib import closing

import pytest
from brokers import Scripted, message_of, numbers_of
from cli import outcome, started
from limits import HANG_S, until
from services import Process, config_of, connect, frame, replayed, service_of

import penstock as ps
from penstock.base.errors import InputError, StateError, UsageError
from penstock.checkpoint.store import Folder
from penstock.contrib.connectors.nats_stream import NatsStream
from penstock.io.partitions.partition_reader import PartitionReader

FRAMES = [frame(number, step=number) for number in range(30)]
OTHERS = [frame(number, step=number, seed=1) for number in range(30)]
MESSAGES, OTHER_MESSAGES = [message_of(each) for each in FRAMES], [message_of(each) for each in OTHERS]


def committed(folder):
    """The hash of the last commit."""
    return ps.Engine.restore(folder).state_hash()


def serving(config, nats, folder):
    saving = ("--checkpoint", folder, "--every", 1, "--resume", "--grace", 0)
    return Process(config, "--nats", nats.uri, *saving, "--json")


# ---- NATS


@pytest.mark.parametrize("sent", [2, 5, 12], ids=["shorter", "equal", "longer"])
def test_a_replay_refuses_a_stream_that_was_created_again(nats, config, tmp_path, refused, capsys, sent):
    nats.send(*MESSAGES[:5])
    words = ("replay", config, nats.uri, "--checkpoint", tmp_path / "c", "--resume")
    assert outcome(capsys, *words)[0] == 0
    nats.create_again(*OTHER_MESSAGES[:sent])
    line = refused(5, *words)
    assert line.startswith(f"penstock: {nats.uri}, sequence 6 is next, and the stream was deleted and created again ")
    assert line.endswith("; use another checkpoint, or the former stream\n")
    assert committed(tmp_path / "c") == replayed(FRAMES[:5]).state_hash()


def test_a_service_refuses_the_position_of_a_replay_and_the_other_way_round(nats, tmp_path):
    nats.send(*MESSAGES[:5])
    ps.Engine(config_of()).run(nats.uri, checkpoint=tmp_path / "replayed")
    with service_of(folder=tmp_path / "served", partitions=[NatsStream(nats.uri)]) as service:
        until(lambda: service.sequencer.position("nats/gradients") == 5)
    nats.create_again(*OTHER_MESSAGES[:9])
    engine = ps.Engine.restore(tmp_path / "replayed")
    with (
        pytest.raises(StateError, match="the stream was deleted and created again"),
        service_of(engine, tmp_path / "replayed", resume=True, partitions=[NatsStream(nats.uri)]) as service,
    ):
        assert service.wants_to_end.wait(HANG_S)
    with pytest.raises(StateError, match="the stream was deleted and created again"):
        ps.Engine.restore(tmp_path / "served").run(nats.uri, checkpoint=tmp_path / "served", resume=True)


def test_a_replay_that_follows_ends_when_its_stream_is_created_again(nats, config, tmp_path):
    nats.send(*MESSAGES[:5])
    process = started("replay", config, nats.uri, "--follow", "--checkpoint", tmp_path / "c", "--every", 1)
    until(lambda: Folder(tmp_path / "c").numbers() and ps.Engine.restore(tmp_path / "c").global_step == 5)
    nats.create_again(*OTHER_MESSAGES[:12])
    _, error = process.communicate(timeout=HANG_S)
    assert (process.returncode, b"the stream was deleted and created again" in error) == (5, True), error
    assert committed(tmp_path / "c") == replayed(FRAMES[:5]).state_hash()


def test_a_service_ends_when_its_stream_is_created_again(nats, config, tmp_path):
    nats.send(*MESSAGES[:5])
    with serving(config, nats, tmp_path / "c") as running, connect(running.uri) as client:
        until(lambda: client.position("nats/gradients") == 5)
        nats.create_again(*OTHER_MESSAGES[:12])
        code, _, error = running.wait()
    assert (code, "the stream was deleted and created again" in error) == (5, True), error
    assert committed(tmp_path / "c") == replayed(FRAMES[:5]).state_hash()


def test_a_reader_that_reconnects_to_a_server_with_another_stream_ends(nats, config, tmp_path):
    nats.send(*MESSAGES[:5])
    with serving(config, nats, tmp_path / "c") as running, connect(running.uri) as client:
        until(lambda: client.position("nats/gradients") == 5)
        nats.kill()
        nats.folder = tmp_path / "empty"  # a volume that was lost
        nats.start()
        nats.send(*OTHER_MESSAGES[:12])
        code, _, error = running.wait()
    assert code == 5, error
    assert committed(tmp_path / "c") == replayed(FRAMES[:5]).state_hash()


def test_a_stream_that_was_there_is_waited_for_and_one_that_never_was_is_not(nats):
    known, unknown = NatsStream(nats.uri), NatsStream(nats.uri)
    known.creation()
    nats.delete()
    with closing(known), closing(unknown):
        with pytest.raises(OSError, match="stream not found; it was there before"):
            known.retained_range()
        with pytest.raises(UsageError, match="stream not found; create the stream, or correct its name"):
            unknown.retained_range()


def test_a_stream_of_which_nothing_was_applied_may_be_created_again(nats, tmp_path):
    engine = ps.Engine(config_of())
    engine.run(nats.uri)
    engine.save(tmp_path / "c")
    nats.create_again(*MESSAGES[:5])
    engine = ps.Engine.restore(tmp_path / "c")
    assert engine.run(nats.uri, checkpoint=tmp_path / "c", resume=True).frames == 5
    assert engine.state_hash() == replayed(FRAMES[:5]).state_hash()


def test_a_position_that_was_saved_elsewhere_names_the_stream_too(nats, tmp_path):
    nats.send(*MESSAGES[:5])
    engine = ps.Engine(config_of())
    engine.run(nats.uri)
    engine.save(tmp_path / "c")
    nats.create_again(*OTHER_MESSAGES[:9])
    with pytest.raises(StateError, match="the stream was deleted and created again"):
        ps.Engine.restore(tmp_path / "c").run(nats.uri, checkpoint=tmp_path / "c", resume=True)


def test_a_restarted_server_and_a_purged_stream_are_the_former_ones(nats, tmp_path):
    nats.send(*MESSAGES[:5])
    ps.Engine(config_of()).run(nats.uri, checkpoint=tmp_path / "c")
    nats.kill()
    nats.start()
    nats.purge(6)
    nats.send(*MESSAGES[5:9])
    engine = ps.Engine.restore(tmp_path / "c")
    assert engine.run(nats.uri, checkpoint=tmp_path / "c", resume=True).notes == ()
    assert engine.state_hash() == replayed(FRAMES[:9]).state_hash()


# ---- any broker


class Created(Scripted):
    """A scripted partition whose topic has a creation. end : of the broker that answers: it is lost at the next read"""

    def __init__(self, numbers, creation="id A", **options):
        super().__init__(numbers, **options)
        self.created = creation

    def creation(self):
        self._may_fail()
        return self.created


@pytest.mark.parametrize("numbers", [[1], [1, 2, 3], [1, 2, 3, 4, 5]], ids=["shorter", "equal", "longer"])
def test_a_topic_that_was_created_again_is_refused_at_the_start_and_after_a_failure(numbers):
    problem = r"offset 3 is next, and the topic was deleted and created again \(expected id A, got id B\); use another"
    with pytest.raises(StateError, match=problem):
        PartitionReader(Created(numbers, "id B"), 3, 60, "id A").read(0)
    partition = Created([1, 2, 3])
    reader = PartitionReader(partition, 0, 60)
    assert (numbers_of(reader, 3), reader.creation) == ([1, 2, 3], "id A")
    partition.numbers, partition.created, partition.failures = numbers, "id B", [True]
    assert not reader.read(0)
    with pytest.raises(StateError, match=problem):
        reader.read(0)


def test_a_position_of_a_broker_that_gave_no_id_then_is_accepted():
    reader = PartitionReader(Created([1, 2, 3, 4]), 3, 60)
    assert numbers_of(reader, 1) == [4]
    assert reader.creation == "id A"


@pytest.mark.parametrize("creation", [None, "id A"])
def test_a_position_at_the_start_is_of_any_topic(creation):
    reader = PartitionReader(Created([1, 2], "id B"), 0, 60, creation)
    assert (numbers_of(reader, 2), reader.creation) == ([1, 2], "id B")


def test_brokers_without_ids_have_nothing_to_compare():
    reader = PartitionReader(Created([1, 2, 3, 4], None), 3, 60)
    assert (numbers_of(reader, 1), reader.creation) == ([4], None)


def test_brokers_that_gave_an_id_and_give_none_now_are_waited_for():
    with pytest.raises(InputError, match="it gives no id of the topic, and the position is of id A"):
        PartitionReader(Created([1, 2, 3, 4], None), 3, 0, "id A").read(0)
