"""Children that a process with engines, files and connections forks."""

import faulthandler
import os
import subprocess
import sys
import threading
import traceback
from contextlib import contextmanager
from functools import partial

import engines
import numpy as np
import pyarrow as pa
import pytest
from limits import HANG_S, in_thread
from services import Process, config_of
from services import frame as service_frame

import penstock as ps
import penstock.base.forks as forks
from penstock.base.filesystem import atomic_files
from penstock.contrib.targets.python_function import PythonFunction
from penstock.serving.flight import connect

# jax warns of any fork.
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning",
        "ignore:os.fork:RuntimeWarning",
        "ignore:.*multi-threaded:DeprecationWarning",
    ),
]


engine_of = partial(engines.engine_of, ps.SGD(0.5), rows=8, initializer=ps.Constant(1.0))


def frame(row_id):
    return pa.record_batch({"id": [row_id], "gradient": pa.array([[1.0, 1.0]], pa.list_(pa.float32(), 2))})


class Child:
    """A forked child that answers with one text, or with another exit code if it hangs."""

    def __init__(self, work):
        self._answer, say = os.pipe()
        self.process = os.fork()
        if not self.process:
            faulthandler.dump_traceback_later(HANG_S / 10, exit=True)
            try:
                os.write(say, str(work()).encode())
            except BaseException:
                os.write(say, traceback.format_exc().encode())
            finally:
                os._exit(0)
        os.close(say)

    def answer(self):
        with open(self._answer, "rb") as file:
            text = file.read().decode()
        assert os.waitpid(self.process, 0)[1] == 0, "the child hung"
        return text


def refused(*attempts):
    """Return how many attempts raise the error of a fork."""
    count = 0
    for attempt in attempts:
        try:
            attempt()
        except ps.StateError as error:
            count += "this process is a fork of it" in str(error)
    return count


def test_a_child_looks_up_rows_on_the_host_as_they_were_at_the_fork():
    engine = engine_of(threads=2)
    engine.apply({"t": ([3], [[1.0, 1.0]])})

    def work():
        with engine.still():
            rows = engine.lookup("t", np.arange(8))
        same = np.array_equal(rows, engine.view("t")) and len(engine.state_hash()) == 64
        return rows[3].tolist(), engine.reads.lookup("t", [4]).tolist(), same

    child = Child(work)
    engine.apply({"t": ([3], [[1.0, 1.0]])})
    assert child.answer() == "([0.5, 0.5], [[1.0, 1.0]], True)"
    assert engine.lookup("t", [3]).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("shared", [False, True])
def test_a_child_changes_and_saves_nothing(tmp_path, shared):
    engine = engine_of(shared=tmp_path / "shared" if shared else None)
    engine.save(tmp_path / "state")
    attempts = [
        lambda: engine.apply({"t": ([3], [[1.0, 1.0]])}),
        lambda: engine.run([frame(3)]),
        lambda: list(engine.stage([frame(3)])),
        lambda: engine.save(tmp_path / "other"),
        lambda: engine.load_parameters("t", np.ones((8, 2))),
        lambda: engine.flush(),
        lambda: engine.tag("best"),
        lambda: engine.rollback(0),
        lambda: engine.table("t"),
    ]
    assert Child(lambda: refused(*attempts)).answer() == str(len(attempts))
    assert not (tmp_path / "other").exists()
    assert not list((tmp_path / "state").glob("*.tag"))
    assert engine.lookup("t", [3]).tolist() == [[1.0, 1.0]]  # also rows in memory that both have mapped


def test_a_child_may_not_read_rows_on_devices():
    engine = engine_of(variant="xla")
    attempts = [
        lambda: engine.lookup("t", [3]),
        lambda: engine.retrieve_parameters("t"),
        lambda: engine.apply({"t": ([3], [[1.0, 1.0]])}),
    ]
    assert Child(lambda: refused(*attempts)).answer() == "3"


def test_a_child_makes_its_own_engine(tmp_path):
    engine_of().save(tmp_path / "state")

    def work():
        engine = ps.Engine.restore(tmp_path / "state")
        engine.run([frame(3)], checkpoint=tmp_path / "state", resume=True)
        return engine.global_step

    assert Child(work).answer() == "1"
    assert ps.Engine.restore(tmp_path / "state").global_step == 1


@contextmanager
def step_of_another_thread(engine):
    """An event that ends the step."""
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with engine.still():
            entered.set()
            leave.wait(HANG_S)

    ended = in_thread(hold)
    entered.wait(HANG_S)
    yield leave
    leave.set()
    ended()


def test_a_fork_waits_for_the_step_of_another_thread():
    engine = engine_of()
    with step_of_another_thread(engine) as leave:
        threading.Timer(0.05, leave.set).start()
        assert Child(lambda: engine.lookup("t", [3]).tolist()).answer() == "[[1.0, 1.0]]"
    assert engine.apply({"t": ([3], [[1.0, 1.0]])})


def test_a_child_of_an_unfinished_step_is_refused_instead_of_hanging(monkeypatch):
    monkeypatch.setattr("penstock.core.gate.FORK_WAIT_S", 0.0)
    engine = engine_of()
    with step_of_another_thread(engine):
        assert Child(lambda: refused(lambda: engine.lookup("t", [3]))).answer() == "1"


def test_a_child_of_a_reader_opens_the_next_tables_of_the_writer(tmp_path):
    engine_of(shared=tmp_path)
    reader = ps.Reader(tmp_path)
    engine = engine_of(shared=tmp_path)
    engine.apply({"t": ([3], [[1.0, 1.0]])})
    with reader._reopening:  # as if another thread were about to open them
        child = Child(lambda: reader.lookup("t", [3]).tolist())
    assert child.answer() == "[[0.5, 0.5]]"


@pytest.mark.parametrize("leaves", ["raises", "ends the source", "continues"])
def test_a_child_that_leaves_a_run_writes_nothing_to_its_files(tmp_path, leaves):
    """The files after a run in which a child was forked are those of a run without."""
    parent = os.getpid()

    def frames(forks_once):
        for number in range(6):
            if number == 3 and forks_once:
                child = os.fork()
                if not child and leaves == "raises":
                    raise SystemExit("leave")
                if not child and leaves == "ends the source":
                    return
                if child:
                    assert os.waitpid(child, 0)[1] == 0
            yield frame(99 if number == 1 else number)

    def run(folder, forks_once):
        folder.mkdir()
        engine = engine_of()
        files = {"deltas": folder / "d.arrows", "on_bad_row": f"quarantine={folder / 'bad.arrow'}"}
        try:
            engine.run(frames(forks_once), checkpoint=folder / "state", every=1, **files)
        except BaseException:
            if os.getpid() == parent:
                raise
        if os.getpid() != parent:
            engine = None
            os._exit(0)

    run(tmp_path / "plain", False)
    run(tmp_path / "forked", True)
    files = ["d.arrows", "bad.arrow"]
    names = [
        sorted(str(p.relative_to(tmp_path / kind)) for p in (tmp_path / kind).rglob("*.part*"))
        for kind in ("plain", "forked")
    ]
    assert names == [[], []]
    for name in files:
        plain, forked = (read(tmp_path / kind / name) for kind in ("plain", "forked"))
        assert plain == forked, name
    restored = [ps.Engine.restore(tmp_path / kind / "state").state_hash() for kind in ("plain", "forked")]
    assert restored[0] == restored[1]


def read(path):
    opened = pa.ipc.open_file if path.suffix == ".arrow" else pa.ipc.open_stream
    return opened(pa.OSFile(str(path))).read_all().to_pydict()


LOCKS_AND_FORKS = """
import os, sys
import penstock as ps
from test_forks import engine_of, frame
def frames():
    yield frame(1)
    if not os.fork():
        os.read(0, 1)  # until the test closes the pipe
        os._exit(0)
    print("forked", flush=True)
    os.read(0, 1)
    yield frame(2)
engine_of().run(frames(), checkpoint=sys.argv[1], every=1)
"""


def test_a_child_does_not_keep_the_lock_of_a_parent_that_was_killed(tmp_path):
    words = [sys.executable, "-W", "ignore", "-c", LOCKS_AND_FORKS, str(tmp_path)]
    pythonpath = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    running = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": pythonpath}
    )
    try:
        assert running.stdout.readline() == b"forked\n"
        with pytest.raises(
            ps.UsageError, match=rf"another run is writing checkpoints there \(process {running.pid} on"
        ):
            engine_of().save(tmp_path)
        running.kill()
        running.wait(HANG_S)
        engine_of().save(tmp_path)  # the child still runs
    finally:
        running.stdin.close()
        running.stdout.close()


def test_a_child_may_not_use_a_connection_of_its_parent(tmp_path):
    config_of().save(tmp_path / "tables.pbtxt")
    with Process(tmp_path / "tables.pbtxt") as service, connect(service.uri) as client:
        client.lookup({"user": [3]})
        with client.producer("w0") as producer:
            producer.send(service_frame(1))

            def leave():
                with client, producer:
                    raise SystemExit("leave")

            attempts = [lambda: client.lookup({"user": [3]}), client.status, producer.poll, producer.wait]
            assert Child(lambda: refused(*attempts)).answer() == str(len(attempts))
            assert "leave" in Child(leave).answer()
            producer.send(service_frame(2))
        assert client.position("w0") == 2
        assert client.lookup({"user": [3]}).version.step == 2


STATUSES = []


def forking(batch, step):
    if child := os.fork():
        STATUSES.append(os.waitpid(child, 0)[1])
    elif step:
        raise ValueError("in the child")


@pytest.mark.parametrize("step", [0, 1], ids=["returns", "raises"])
def test_a_child_of_a_function_that_follows_writes_no_state(tmp_path, step):
    parent, target = os.getpid(), PythonFunction(f"{__name__}:forking", tmp_path / "state")
    code = 1
    try:
        target._call(pa.record_batch({"id": [1]}), step)
    except ps.StateError as error:
        code = 0 if "this process is a fork of it" in str(error) else 2
    finally:
        if os.getpid() != parent:
            os._exit(code)
    assert STATUSES.pop() == 0


def test_a_child_does_not_close_a_file_that_has_got_the_number_of_a_lock(tmp_path):
    lock = atomic_files.lock(tmp_path / ".lock")

    def work():
        os.fstat(lock)  # is there
        with pytest.raises(BlockingIOError, match="process"):
            atomic_files.lock(tmp_path / ".lock")  # its parent's
        forks.close(lock)
        return "closed"

    assert Child(work).answer() == "closed"
    with pytest.raises(BlockingIOError):
        atomic_files.lock(tmp_path / ".lock")
    forks.close(lock)
    forks.close(atomic_files.lock(tmp_path / ".lock"))


def test_a_child_removes_no_unfinished_file_of_its_parent(tmp_path):
    with atomic_files.publishing(tmp_path / "a") as file:
        file.write(b"begin")

        def leave():
            with file.all_or_nothing():
                raise OSError("in the child")

        assert "in the child" in Child(leave).answer()
        assert "belongs to process" in Child(file.finish).answer()
        file.write(b" end")
    assert (tmp_path / "a").read_bytes() == b"begin end"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
