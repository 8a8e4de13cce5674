"""A replay of a topic: from the committed numbers to the end at its start, or on."""

import signal

import pytest
from brokers import ListedMessages, message_of
from cli import outcome, started
from ipc import write
from limits import HANG_S, until
from services import client_of, config_of, frame, replayed, service_of

import penstock as ps
from penstock.base.errors import InputError
from penstock.checkpoint.store import Folder
from penstock.contrib.connectors.nats_stream import NatsStream
from penstock.io.partitions.partition_source import PartitionSource

FRAMES = [frame(number, step=number) for number in range(40)]
MESSAGES = [message_of(each) for each in FRAMES]


def test_a_replay_continues_at_the_committed_number(nats, config, tmp_path, capsys):
    saving = ("--checkpoint", tmp_path / "c", "--every", 4, "--resume")
    for sent in (15, 27):
        nats.send(*MESSAGES[nats.num_sent : sent])
        before, nats.num_sent = nats.num_sent, sent
        code, report, _ = outcome(capsys, "replay", config, nats.uri, *saving)
        assert (code, report["frames"], report["skipped"]) == (0, sent - before, before)
        assert report["state_hash"] == replayed(FRAMES[:sent]).state_hash()
        nats.purge(sent)  # what was applied need not be retained


def test_a_service_and_a_replay_continue_each_other(nats, tmp_path):
    nats.send(*MESSAGES[:10])
    with (
        service_of(folder=tmp_path / "c", every=3, partitions=[NatsStream(nats.uri)]) as service,
        client_of(service) as client,
    ):
        until(lambda: client.position("nats/gradients") == 10)
    nats.send(*MESSAGES[10:20])
    engine = ps.Engine.restore(tmp_path / "c")
    assert engine.run(nats.uri, checkpoint=tmp_path / "c", resume=True).frames == 10
    nats.send(*MESSAGES[20:25])
    engine = ps.Engine.restore(tmp_path / "c")
    with (
        service_of(engine, tmp_path / "c", resume=True, partitions=[NatsStream(nats.uri)]) as service,
        client_of(service) as client,
    ):
        until(lambda: client.position("nats/gradients") == 25)
        assert engine.state_hash() == replayed(FRAMES[:25]).state_hash()


def has_committed(process, folder, step):
    """Whether a command has committed so many steps; it must still run."""
    assert process.poll() is None, process.communicate()
    return Folder(folder).numbers() and ps.Engine.restore(folder).global_step >= step


def test_following_takes_what_arrives_until_a_signal_and_commits_it(nats, config, tmp_path):
    nats.send(*MESSAGES[:5])
    saving = ("--checkpoint", tmp_path / "c", "--every", 1)
    process = started("replay", config, nats.uri, "--follow", *saving)
    until(lambda: has_committed(process, tmp_path / "c", 3))
    nats.send(*MESSAGES[5:8])
    nats.kill()
    nats.start()
    nats.send(*MESSAGES[8:12])
    until(lambda: has_committed(process, tmp_path / "c", 10))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1].startswith("penstock: interrupted after step ")
    engine = ps.Engine.restore(tmp_path / "c")
    engine.run(nats.uri, checkpoint=tmp_path / "c", resume=True)
    assert engine.state_hash() == replayed(FRAMES[:12]).state_hash()


def test_a_following_replay_that_is_killed_repeats_and_loses_nothing(nats, config, tmp_path):
    for sent in (6, 14, 22):
        nats.send(*MESSAGES[nats.num_sent : sent])
        nats.num_sent = sent
        saving = ("--checkpoint", tmp_path / "c", "--every", 1, "--resume")
        process = started("replay", config, nats.uri, "--follow", *saving)
        until(lambda process=process, sent=sent: has_committed(process, tmp_path / "c", sent - 4))
        process.kill()
        process.communicate()
    engine = ps.Engine.restore(tmp_path / "c")
    engine.run(nats.uri, checkpoint=tmp_path / "c", resume=True)
    assert engine.state_hash() == replayed(FRAMES[:22]).state_hash()


def test_gaps_at_both_ends_are_no_error(nats):
    nats.send(*MESSAGES[:9])
    for sequence in (1, 4, 8, 9):
        nats.remove(sequence)
    engine = ps.Engine(config_of())
    assert engine.run(nats.uri).frames == 5
    assert engine.state_hash() == replayed([FRAMES[n - 1] for n in (2, 3, 5, 6, 7)]).state_hash()


def test_retention_that_has_passed_is_an_incompatible_state(nats, config, tmp_path, refused, capsys):
    saving = ("--checkpoint", tmp_path / "c", "--resume")
    nats.send(*MESSAGES[:5])
    assert outcome(capsys, "replay", config, nats.uri, *saving)[0] == 0
    nats.send(*MESSAGES[5:12])
    nats.purge(9)
    line = refused(5, "replay", config, nats.uri, *saving)
    assert f"penstock: {nats.uri}, sequence 6 is next, and the topic retains only what follows " in line


def test_a_bad_message_is_named_and_may_be_dropped_as_a_whole(nats, config, tmp_path, refused, capsys):
    nats.send(MESSAGES[0], b"no Arrow", MESSAGES[1], b"")
    line = refused(3, "replay", config, nats.uri)
    assert line.startswith(f"penstock: {nats.uri}, sequence 2: ")
    saving = ("--checkpoint", tmp_path / "c", "--resume")
    code, report, _ = outcome(capsys, "replay", config, nats.uri, "--on-bad-row", "drop", *saving)
    assert (code, report["frames"], report["dropped"]) == (0, 2, {"bad_message": 2})
    assert report["state_hash"] == replayed(FRAMES[:2]).state_hash()
    # They are behind the committed place.
    assert outcome(capsys, "replay", config, nats.uri, *saving)[1]["frames"] == 0


def test_a_message_is_limited():
    engine = ps.Engine(config_of())
    with pytest.raises(InputError, match=r"partition 0, offset 1: [\d,]+ bytes, expected 1,000 at most"):
        engine.run(
            PartitionSource(ListedMessages(0, map(message_of, [frame(0, rows=2), frame(1, rows=90)])), 60),
            max_message=1000,
        )
    assert engine.global_step == 1


def test_a_broker_that_is_gone_is_reported_at_once_and_bad_input_after_patience(nats, config, capsys):
    nats.kill()
    code, _, text = outcome(capsys, "replay", config, nats.uri, "--patience", "0.2")
    retrying, line = text.splitlines()
    assert code == 3
    assert retrying.startswith(f'penstock: retrying error="{nats.uri}: the broker cannot be reached: ')
    assert retrying.endswith('" retried_s=0 patience="0.2 s"')
    assert line.startswith(f"penstock: {nats.uri}: the broker cannot be reached: ")


def test_validate_reads_a_topic(nats, config, capsys):
    nats.send(*MESSAGES[:3], b"no Arrow")
    code, result, _ = outcome(capsys, "validate", config, nats.uri)
    (source,) = result["sources"]
    assert (code, source["frames"], source["bad_rows"]) == (3, 3, {"bad_message": 1})


def test_sources_that_cannot_be_read_together(nats, config, tmp_path, refused):
    write(tmp_path / "log.arrows", FRAMES[:1])
    line = refused(2, "replay", config, nats.uri, tmp_path / "log.arrows")
    assert "log.arrows: give files before topics and tables with versions" in line
    line = refused(2, "replay", config, tmp_path / "log.arrows", nats.uri, "--merge", "step")
    assert "--merge step: nats/gradients cannot be merged with files" in line
    line = refused(2, "replay", config, tmp_path / "log.arrows", "--follow")
    assert "log.arrows does not grow; expected delta:, iceberg:, kafka://, lance: or nats://" in line
    line = refused(2, "replay", config, nats.uri, "--contribution-rows", 2)
    assert "--contribution-rows: a message of " in line


SPLIT = [FRAMES[0:9:3], FRAMES[1:9:3] + FRAMES[9:12], FRAMES[2:9:3]]
ORDERS = {
    None: [*SPLIT[0], *SPLIT[1], *SPLIT[2]],
    "step": FRAMES[:12],
    "round": FRAMES[:12],
}


def partitions():
    return [PartitionSource(ListedMessages(number, map(message_of, frames)), 60) for number, frames in enumerate(SPLIT)]


@pytest.mark.parametrize("merge", ORDERS)
def test_partitions_are_sources_in_their_order_also_after_a_stop_at_any_frame(merge, tmp_path):
    expected = ps.Engine(config_of())
    expected.run(iter(ORDERS[merge]))
    for stop in range(1, 12):
        folder = tmp_path / f"{stop}"
        ps.Engine(config_of()).run(partitions(), merge=merge, limit=stop, checkpoint=folder)
        engine = ps.Engine.restore(folder)
        report = engine.run(partitions(), merge=merge, checkpoint=folder, resume=True)
        assert (report.skipped, report.frames) == (stop, 12 - stop)
        assert engine.state_hash() == expected.state_hash()


def test_a_file_is_read_again_and_the_topic_after_it_is_not(tmp_path):
    path = write(tmp_path / "log.arrows", FRAMES[:4])
    for stop in (2, 6):
        folder = tmp_path / f"{stop}"
        topic = ListedMessages(0, MESSAGES[4:8])
        ps.Engine(config_of()).run([path, PartitionSource(topic, 60)], limit=stop, checkpoint=folder)
        engine = ps.Engine.restore(folder)
        topic.messages[: max(stop - 4, 0)] = [b"never read again"] * max(stop - 4, 0)
        engine.run([path, PartitionSource(topic, 60)], checkpoint=folder, resume=True)
        assert engine.state_hash() == replayed(FRAMES[:8]).state_hash()


@pytest.mark.parametrize("source", ["nats://127.0.0.1:1/t", "delta:rows", "-"])
def test_a_job_on_a_cluster_reads_no_topic(source, config, refused):
    line = refused(2, "job", config, source, "--shares", 2)
    assert line.startswith(f"penstock: {source.partition(':')[0]}: a job opens its sources on each machine; ")
