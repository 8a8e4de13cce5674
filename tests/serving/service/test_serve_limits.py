"""What the service refuses, and what it bounds: strangers, large messages, many callers, slow ones."""

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from limits import HANG_S, in_thread, until
from services import client_of, config_of, frame, replayed, self_signed, service_of

import penstock as ps
from penstock.base.filesystem import atomic_files
from penstock.cli.main import main
from penstock.serving.flight import connect
from penstock.serving.flight.connection import Address
from penstock.serving.flight.messages import PutRequest, encoded
from penstock.serving.service.auth import check_protected
from penstock.serving.service.limits import Limits

FRAMES = [frame(n) for n in range(6)]


def test_a_wrong_token_is_refused_before_anything_is_read():
    with service_of(tokens=(b"s3cret", b"second")) as service:
        for token in (None, "wrong", "s3cre"):
            client = client_of(service, token=token)
            with pytest.raises(ps.ServiceError, match="the token is missing or wrong"):
                client.put(FRAMES, "w0")
            client.close()
        for token in ("s3cret", "second"):
            with client_of(service, token=token) as client:
                assert client.status()["frames"] == 0
        assert service.admission.num_refused >= 3


def test_the_token_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("PENSTOCK_FLIGHT_TOKEN", "s3cret")
    with service_of(tokens=(b"s3cret",)) as service, client_of(service) as client:
        assert client.put(FRAMES, "w0").position == 6


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("tls"))


def test_over_tls_a_client_that_trusts_the_certificate_gets_in(certificate):
    pair = [((certificate / "cert.pem").read_bytes(), (certificate / "key.pem").read_bytes())]
    with service_of(address=Address("127.0.0.1", 0, True), tls=pair, tokens=(b"s3cret",)) as service:
        assert service.address.uri.startswith("grpc+tls://")
        roots = str(certificate / "cert.pem")
        with connect(service.address.uri, token="s3cret", roots=roots) as client:
            assert client.put(FRAMES, "w0").position == 6
        plain = service.address.uri.replace("grpc+tls", "grpc")
        for uri in (service.address.uri, plain):  # a client without the certificate, and one without TLS
            with connect(uri, token="s3cret", patience_s=0.2) as client, pytest.raises(ps.ServiceError):
                client.status()


def test_addresses_beyond_loopback_need_tls_and_a_token():
    outside = Address("0.0.0.0", 1, False)
    with pytest.raises(ps.UsageError, match=r"it lacks encryption .* and a token \(--token-file\)"):
        check_protected(outside, False, insecure=False)
    with pytest.raises(ps.UsageError, match=r"it lacks a token"):
        check_protected(Address("10.0.0.1", 1, True), False, insecure=False)
    with pytest.raises(ps.UsageError, match=r"it lacks encryption"):
        check_protected(Address("example.org", 1, False), True, insecure=False)
    check_protected(outside, False, insecure=True)
    check_protected(Address("10.0.0.1", 1, True), True, insecure=False)
    assert all(Address(host, 1, False).is_loopback for host in ("127.0.0.1", "127.8.9.1", "[::1]", "localhost"))
    assert not any(
        Address(host, 1, False).is_loopback for host in ("0.0.0.0", "[::]", "192.168.0.1", "localhost.example.org")
    )


def test_tls_files_and_scheme_go_together(tmp_path, capsys):
    config_of().save(tmp_path / "c.pbtxt")
    (tmp_path / "x").write_text("x")
    words = ["serve", str(tmp_path / "c.pbtxt"), "--tls-cert", str(tmp_path / "x"), "--tls-key", str(tmp_path / "x")]
    assert main(words) == 2
    assert "--tls-cert and --tls-key go with --listen grpc+tls://" in capsys.readouterr().err


def test_a_message_that_is_too_large_is_refused():
    with service_of(limits=Limits(message_bytes=10_000)) as service, client_of(service) as client:
        client.put(FRAMES[:1], "w0")
        with pytest.raises(ps.InputError, match=r"a batch of [\d,]+ bytes; this service takes 10,000 at most"):
            client.put([frame(1, rows=1000)], "w0")
        client.put(FRAMES[1:], "w0")
        assert service.engine.state_hash() == replayed(FRAMES).state_hash()
        assert service.producers.budget.num_rows == 0


def test_a_hundred_clients_at_once_are_served_or_retry():
    """Eight at a time: the others try again until they get in, and every frame is applied once."""
    with service_of(limits=Limits(calls=8)) as service:

        def push(n):
            with client_of(service) as client:
                return client.put([frame(n)], f"w{n}").position

        assert [done() for done in [in_thread(lambda n=n: push(n)) for n in range(100)]] == [1] * 100
        assert (service.sequencer.counters.frames, service.engine.global_step) == (100, 100)
        assert len(service.sequencer.streams.producers) == 100
        until(lambda: service.admission.num_calls == 0)


def hold(client, name, frames=()):
    """A put of any Flight client that sends these frames and then nothing more, as one whose host vanishes."""
    writer, reader = client.do_put(PutRequest(contributor=name).descriptor(), FRAMES[0].schema)
    for each in frames:
        writer.write_batch(each)
    return writer, reader


def test_another_stream_of_a_producer_ends_one_that_sends_nothing_more(monkeypatch):
    monkeypatch.setattr("penstock.serving.service.put_streams.REPLACED_S", 0.0)
    with service_of() as service, flight.connect(service.address.uri) as gone, client_of(service) as client:
        held = hold(gone, "w0", FRAMES[:2])
        until(lambda: service.engine.global_step == 2)
        with client.producer("w0") as producer:
            producer.send(FRAMES[2])
            producer.wait()
            until(lambda: service.sequencer.streams.num_open == 1)
        until(lambda: service.admission.num_calls == 0)
        assert service.engine.state_hash() == replayed(FRAMES[:3]).state_hash()
        del held


def test_a_put_without_a_message_ends_and_its_producer_continues(caplog):
    with service_of(limits=Limits(idle_s=0.1)) as service, client_of(service) as client:
        with client.producer("w0") as producer:
            producer.send(FRAMES[0])
            producer.wait()
            until(lambda: service.sequencer.streams.num_open == 0)
            producer.send(FRAMES[1])
        assert client.position("w0") == 2
    assert "no message came for 0.1 s (--idle-timeout)" in caplog.text


def test_actions_get_in_while_producers_have_all_calls():
    with service_of(limits=Limits(calls=2)) as service, flight.connect(service.address.uri) as raw:
        held = [hold(raw, f"w{number}", FRAMES[:1]) for number in range(2)]
        until(lambda: service.admission.num_calls == 2)
        with client_of(service, patience_s=0) as client:
            assert client.status()["calls"] == 3
            with pytest.raises(ps.ServiceError, match=r"busy with 2 calls \(--max-calls\); try again"):
                client.lookup({"user": [3]})
            client.drain()
        assert service.wants_to_end.is_set()
        del held


def test_a_slow_reader_is_disconnected_and_does_not_block_others():
    rows, wide = 4000, 64
    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(rows, wide, name="user", optimizer=ps.SGD(0.1))])
    gradient = pa.FixedSizeListArray.from_arrays(np.ones(rows * wide, np.float32), wide)
    all_rows = pa.record_batch({"id": np.arange(rows), "gradient": gradient})
    with service_of(ps.Engine(config), limits=Limits(delta_bytes=4 << 20)) as service, client_of(service) as client:
        raw = flight.connect(service.address.uri)
        stream = raw.do_get(flight.Ticket(encoded({"deltas": {"since": "0", "follow": True}})))
        client.put([all_rows] * 60, "w0")  # 60 MB of deltas, without a read
        assert service.engine.global_step == 60
        assert service.log.num_bytes <= 4 << 20
        with pytest.raises(flight.FlightServerError, match=r"deltas are kept from step \d+ on, .* the tables again"):
            list(stream)
        raw.close()


def test_a_producer_that_reads_no_acknowledgements_does_not_block_others():
    with service_of() as service, client_of(service) as client:
        deaf = flight.connect(service.address.uri)
        writer, reader = deaf.do_put(PutRequest(contributor="deaf").descriptor(), FRAMES[0].schema)
        for _ in range(300):
            writer.write_batch(FRAMES[0])
        assert client.put(FRAMES, "w0").position == 6
        until(lambda: service.sequencer.streams.position("deaf") == 300)
        writer.close()
        del reader
        deaf.close()


def test_a_producer_beyond_the_limit_is_refused():
    with service_of(limits=Limits(producers=2)) as service, client_of(service) as client:
        for name in ("a", "b", "a"):
            client.put(FRAMES[:1], name)
        with pytest.raises(ps.UsageError, match="positions of 2 producers are kept, and no more"):
            client.put(FRAMES[:1], "c")


def test_producers_that_send_nothing_do_not_count_toward_the_limit(tmp_path):
    with service_of(limits=Limits(producers=2), folder=tmp_path / "c") as service, client_of(service) as client:
        raw = flight.connect(service.address.uri)
        for n in range(5):
            descriptor = PutRequest(contributor=f"silent{n}", first=1).descriptor()
            writer, _ = raw.do_put(descriptor, FRAMES[0].schema)
            writer.done_writing()
            writer.close()
        raw.close()
        assert client.status()["producers"] == 0
        for name in ("a", "b"):
            assert client.put(FRAMES[:1], name).position == 1
    assert ps.Engine.restore(tmp_path / "c").session.positions.producers == {"a": 1, "b": 1}


def push(writer):
    writer.write_batch(FRAMES[0])
    writer.close()


def test_producers_that_send_first_are_kept_within_the_limit():
    with service_of(limits=Limits(producers=1)) as service, client_of(service) as first, client_of(service) as two:
        a = first.producer("a")
        writer, _ = two.connection.opened()[0].do_put(
            PutRequest(contributor="b", first=1).descriptor(), FRAMES[0].schema
        )
        until(lambda: service.sequencer.streams.num_open == 1)
        a.send(FRAMES[0])
        a.close()
        with pytest.raises(flight.FlightServerError, match="'b': positions of 1 producers are kept, and no more"):
            push(writer)
        assert service.engine.global_step == 1


def test_a_disk_that_is_full_ends_the_service_with_its_last_commit_whole(tmp_path, monkeypatch):
    class Full(type(atomic_files.operations)):  # type: ignore[misc]
        def write(self, *_):
            raise OSError(28, "No space left on device")

    def fill_the_disk():
        with service_of(folder=tmp_path / "c", every=3) as service, client_of(service, patience_s=0.2) as client:
            client.put(FRAMES[:3], "w0")
            monkeypatch.setattr(atomic_files, "operations", Full())
            with pytest.raises(ps.ServiceError):
                client.put(FRAMES[3:], "w0")
            assert service.wants_to_end.wait(HANG_S)

    with pytest.raises(OSError, match="No space left"):  # as the service ends
        fill_the_disk()
    monkeypatch.undo()
    assert ps.Engine.restore(tmp_path / "c").state_hash() == replayed(FRAMES[:3]).state_hash()
