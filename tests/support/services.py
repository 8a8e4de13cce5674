"""What the tests of the Flight service share: a service in this process, and one in a separate process."""

import socket
import subprocess
import sys
from contextlib import contextmanager

import engines
import numpy as np
import pyarrow.flight as flight
import pytest
from batches import batch
from limits import HANG_S

import penstock as ps
from penstock.checkpoint.store import Folder
from penstock.io.decoding.read_options import ReadOptions
from penstock.model.learning_rates import LearningRates
from penstock.serving.flight import connect
from penstock.serving.flight.connection import Address
from penstock.serving.flight.messages import PutRequest, decoded
from penstock.serving.service.auth import Role
from penstock.serving.service.sequencer import Saving
from penstock.serving.service.server import Service

DIM, VOCABULARY = 4, 500
LOOPBACK = Address("127.0.0.1", 0, False)


def config_of(tables=("user",), optimizer=None):
    """A configuration of equal tables."""
    return engines.config_of(optimizer or ps.Adagrad(0.1), tables, DIM, VOCABULARY)


def frame(number, rows=20, table=None, step=None, seed=0, **columns):
    """One frame of one producer, the same whenever it is asked for."""
    rng = np.random.default_rng([seed, number])
    return batch(rng.integers(0, VOCABULARY, rows), rng.standard_normal((rows, DIM)), table=table, step=step, **columns)


def replayed(frames, config=None, **arguments):
    """An engine that these frames were applied to."""
    engine = ps.Engine(config or config_of(), **arguments)
    engine.run(iter(frames))
    return engine


def free_port():
    """A port that nothing listens at."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@contextmanager
def service_of(engine=None, folder=None, every=None, resume=False, grace_s=HANG_S, **arguments):
    """A service that listens, and ends in order."""
    engine = engine or ps.Engine(config_of())
    config = engine.config
    rates = LearningRates(config.num_tags, arguments.pop("learning_rates", None), {})
    given = {"on_bad_row": arguments.pop("on_bad_row", "error"), "columns": arguments.pop("columns", None)}
    reading = ReadOptions.of_config(config, given, rates_needed=rates.missing, unvalidated=True)
    if not isinstance(tokens := arguments.get("tokens", {}), dict):
        arguments["tokens"] = dict.fromkeys(tokens, Role.OPERATOR)
    saving = None if folder is None else Saving(Folder(folder), every, resume)
    service = Service(engine, arguments.pop("address", LOOPBACK), reading, rates, saving=saving, **arguments)
    try:
        yield service
    finally:
        try:
            service.end()
        finally:
            assert service.close(grace_s), "a call did not end"


def client_of(service, **arguments):
    """A client of a service in this process."""
    return connect(service.address.uri, patience_s=arguments.pop("patience_s", HANG_S), **arguments)


def put(service, frames, **request):
    """Put as any Flight client does. Return the last acknowledgement as the service sent it."""
    with flight.connect(service.address.uri) as client:
        writer, reader = client.do_put(PutRequest(**request).descriptor(), frames[0].schema)
        for each in frames:
            writer.write_batch(each)
        writer.done_writing()
        last = {}
        while (message := reader.read()) is not None:
            last = decoded(message, "")["ack"]
        writer.close()
        return last


def refused(writer, reader, error, match):
    """Read a put's messages to its end, which is this error."""
    while reader.read() is not None:
        pass
    with pytest.raises(error, match=match) as caught:
        writer.close()
    assert "Traceback" not in str(caught.value)


class Process:
    """``penstock serve`` in a separate process. under : the beginning of a command that starts it"""

    def __init__(self, *words, under=()):
        command = [*under, sys.executable, "-m", "penstock", "serve", *map(str, words)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.uri = None
        # With --json people's text goes to stderr.
        stream = self.process.stderr if "--json" in words else self.process.stdout
        assert stream is not None
        line = stream.readline()
        if line.startswith("listening "):
            self.uri = line.split()[1].rstrip(",")

    @property
    def address(self):
        return Address.of(self.uri)

    def end(self, number):
        """Send a signal; exit code, stdout, stderr."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self):
        out, err = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, out, err

    def __enter__(self):
        return self

    def __exit__(self, _kind=None, error=None, _traceback=None):
        code = self.process.poll()
        if code is None:
            self.process.kill()
        if not self.process.stderr.closed:  # otherwise the test has read all of it
            _, err = self.process.communicate()
            if error is not None:
                state = "still ran" if code is None else f"had ended with {code}"
                error.add_note(f"the service {state}; on stderr it wrote: {err or 'nothing'}")


class Killable:
    """``penstock serve`` at one address, in a process that ``kill`` ends and ``start`` starts again."""

    def __init__(self, folder, config, *words):
        self.folder = folder
        config.save(folder / "tables.pbtxt")
        self.words = (folder / "tables.pbtxt", "--listen", f"grpc://127.0.0.1:{free_port()}", *words)
        self.start("run")

    def start(self, name):
        resume = ["--resume"] if (self.folder / name).exists() else []
        self.process = Process(*self.words, "--checkpoint", self.folder / name, *resume)
        assert self.process.uri is not None, self.process.wait()
        self.uri = self.process.uri

    def kill(self):
        self.process.process.kill()
        self.process.process.communicate()

    def state_hash(self):
        with ps.connect(self.uri) as client:
            client.checkpoint()
        return ps.Engine.restore(self.folder / "run").state_hash()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.__exit__()


def self_signed(folder):
    """A folder with ``cert.pem``, a self-signed certificate for localhost and 127.0.0.1, and its ``key.pem``."""
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    try:
        subprocess.run([*new, *files], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl to make a certificate")
    return folder
