"""Brokers that refuse a reader for good, as they really do it: each ends it at once, with a way out."""

import socket
import ssl
import subprocess
import threading

import pytest
from brokers import server_path
from limits import until
from services import config_of, free_port, self_signed

from penstock.base.errors import UsageError
from penstock.io.sources.source_kinds import source_kind


def read(uri):
    """Read as ``replay`` and ``serve`` do, with a patience that no test outlasts."""
    for source in source_kind(uri).open(uri, 3600.0):
        try:
            source.fix_end()
        finally:
            source.close()


@pytest.mark.parametrize(
    "uri",
    [
        "kafka://broker:9092/t?sasl.password=hun&zqx",
        "kafka://broker:9092/t?sasl.password=hun#zqx",
        "kafka://user:hunzqx@broker:9092/t",
        "nats://user:hun#zqx@server:4222/gradients",
        "nats://user:hun/zqx@server:4222/gradients",
        "tls://user:hun@zqx@server:4222/gradients",
    ],
)
def test_a_password_that_splits_the_uri_is_refused_and_not_printed(uri, refused, tmp_path):
    config_of().save(tmp_path / "t.pbtxt")
    flag = "--kafka" if uri.startswith("kafka") else "--nats"
    for words in (["serve", tmp_path / "t.pbtxt", flag, uri], ["replay", tmp_path / "t.pbtxt", uri]):
        line = refused(2, *words)
        assert line.startswith(f"penstock: {uri.partition(':')[0]}://…: expected ")
        assert "hun" not in line
        assert "zqx" not in line


@pytest.fixture
def nats(tmp_path):
    """nats(options…) → the address of a server, which is not one with JetStream."""
    pytest.importorskip("nats")
    processes = []

    def started(*options):
        port = free_port()
        words = [server_path("nats-server"), "-a", "127.0.0.1", "-p", str(port), *map(str, options)]
        processes.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))
        until(lambda: answers(port))
        return f"127.0.0.1:{port}"

    yield started
    for process in processes:
        process.kill()
        process.wait()


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_a_nats_server_without_jetstream(nats):
    with pytest.raises(UsageError, match=r"/gradients: JetStream not enabled; start the server with JetStream"):
        read(f"nats://{nats()}/gradients")


def test_a_nats_server_without_tls(nats):
    with pytest.raises(UsageError, match=r"the server answers without TLS; use the address without TLS"):
        read(f"tls://{nats()}/gradients")


def test_a_nats_server_whose_certificate_is_not_trusted(nats, tmp_path):
    folder = self_signed(tmp_path)
    address = nats("--tls", "--tlscert", folder / "cert.pem", "--tlskey", folder / "key.pem")
    with pytest.raises(UsageError, match=r"CERTIFICATE_VERIFY_FAILED.*; give the certificates to trust"):
        read(f"tls://{address}/gradients")


def test_a_nats_user_who_may_not_use_the_subjects_of_jetstream(nats, tmp_path):
    (tmp_path / "nats.conf").write_text(
        f'jetstream: {{store_dir: "{tmp_path}"}}\n'
        'authorization { users = [ {user: u, password: hunter2, permissions: {publish: ["x"], subscribe: [">"]}} ] }\n'
    )
    with pytest.raises(
        UsageError, match=r"(?i)permissions violation .*; check its permissions for \$JS\.API"
    ) as raised:
        read(f"nats://u:hunter2@{nats('-c', tmp_path / 'nats.conf')}/gradients")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("tls", [True, False])
def test_a_broker_of_kafka_whose_tls_handshake_fails(tls, tmp_path):
    pytest.importorskip("confluent_kafka")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    folder = self_signed(tmp_path)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            try:
                while True:
                    connection, _ = server.accept()
                    with connection:
                        if tls:
                            context.wrap_socket(connection, server_side=True).close()
                        else:
                            connection.recv(100)
                            connection.sendall(b"HTTP/1.1 400 Bad Request" + b" " * 100)
            except OSError:
                if server.fileno() >= 0:
                    serve()

        threading.Thread(target=serve, daemon=True).start()
        problem = "certificate verify failed" if tls else "wrong version number"
        with pytest.raises(UsageError, match=rf"{problem}.*; check security\.protocol, ssl\.ca\.location"):
            read(f"kafka://127.0.0.1:{server.getsockname()[1]}/t?security.protocol=SSL")
