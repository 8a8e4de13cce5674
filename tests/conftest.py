"""What every test may use. Eight host devices are made here, before anything loads jax."""

import ctypes
import gc
import os
import resource
import shutil
import signal
import tempfile
from contextlib import closing

import evidence
import jax
import numpy as np
import pytest
from browser import CHROMIUM, Browser
from cli import error_line, outcome
from hypothesis import HealthCheck, settings
from jax.sharding import Mesh
from s3_server import serving
from scripts import loaded, recorded

import penstock as ps
from penstock.checkpoint import incremental
from penstock.core.engine_core import EngineCore
from penstock.rows.bridge import program_cache

os.environ["PENSTOCK_COMPILE_CACHE"] = "off"  # commands started here leave the developer's home alone
os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it once, when it or TensorFlow is first imported

# Under nohup, or in the background of a script, this process ignores these, and so would the commands started here.
for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(ignored) == signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # decided now: a test that asks the command line for more must not get them

# No timing in tests: on a machine with other work the first example of a test takes longer than Hypothesis allows.
# The same examples each time, so that no change is refused for what it did not do; `make weekly` draws others.
settings.register_profile(
    "penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=not evidence.IS_LONG
)
settings.load_profile("penstock")

# Files of tests are in memory where 2 GB are free: a disk takes 5 ms to make a small one durable and to remove it.
IN_MEMORY = "/dev/shm"
if "TMPDIR" not in os.environ and os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > 2 << 30:
    os.environ["TMPDIR"] = tempfile.tempdir = IN_MEMORY

# Of a worker of `make test`, after a module and after a test.
MOST_BYTES, MOST_BYTES_IN_A_MODULE = 400 << 20, 700 << 20


def pytest_collection_modifyitems(config, items):
    evidence.mark(items)
    evidence.rotate(config, items)


def pytest_collection_finish():
    """Garbage collections need not visit what lives as long as the process: modules and tests."""
    gc.collect()
    gc.freeze()


left_bytes = [0]  # by the last free_programs that freed anything


def num_bytes():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * resource.getpagesize()


def free_programs(most_bytes):
    """Free the programs that were compiled if this process has more memory than ``most_bytes``.

    And 100 MB more than the last time left: what is no program stays, and each test would pay 0.4 s for nothing.
    """
    if num_bytes() > max(most_bytes, left_bytes[0] + (100 << 20)):
        program_cache.compiled.cache_clear()
        jax.clear_caches()
        gc.collect()
        getattr(ctypes.CDLL(None), "malloc_trim", bool)(0)  # glibc keeps what XLA frees: 830 MB, then 420
        left_bytes[0] = num_bytes()


@pytest.fixture(autouse=True, scope="module")
def programs_of_a_module():
    """Free the programs that a module has compiled where they are many: no other module runs them."""
    yield
    free_programs(MOST_BYTES)


@pytest.fixture(autouse=True)
def programs_of_a_test():
    """Tests of a module share programs, but not without end."""
    yield
    free_programs(MOST_BYTES_IN_A_MODULE)


@pytest.fixture(scope="session")
def mesh_of():
    """mesh_of(n): a mesh over the first n of eight host devices."""
    return lambda n: Mesh(np.asarray(jax.devices()[:n]), ("shard",))


@pytest.fixture
def compilations():
    """How many programs XLA has compiled since the test began."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def passed(monkeypatch):
    """The numbers of frames that passed together."""
    numbers, push_native = [], EngineCore._push_native

    def push(self, *arguments):
        pushed = push_native(self, *arguments)
        numbers.append(0 if pushed is None else pushed.num_frames)
        return pushed

    monkeypatch.setattr(EngineCore, "_push_native", push)
    return numbers


@pytest.fixture
def config(tmp_path, request):
    """The path of the module's CONFIG, text or an EmbeddingConfig, in a file."""
    path, content = tmp_path / "tables.pbtxt", request.module.CONFIG
    if isinstance(content, str):
        path.write_text(content)
    else:
        content.save(path)
    return path


@pytest.fixture
def call(capsys):
    """call(code, words…) → (text for people, what --json prints) of a command that ends with this exit code"""

    def run(code, *words):
        result, printed, text = outcome(capsys, *words)
        assert result == code, text
        return text, printed

    return run


@pytest.fixture
def imported(tmp_path, config, call):
    """imported(source or sources, words…) → the parts of every table after an import, and what it prints as JSON."""

    def run(source, *words, code=0):
        sources = source if isinstance(source, list) else [source]
        text, result = call(code, "import", *sources, tmp_path / "c", "--config", config, *words)
        if code:
            assert not (tmp_path / "c").exists()
            assert text.count("\n") == 1
            return text
        engine = ps.Engine.restore(tmp_path / "c")
        return {name: engine.retrieve_parameters(name) for name in ("user", "item")}, result

    return run


@pytest.fixture(scope="module")
def buckets():
    """buckets(name): a new bucket of a server that speaks S3; without it, these tests are skipped."""
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def browser():
    """A Chromium; without it, tests of pages are skipped."""
    if CHROMIUM is None:
        pytest.skip("no chromium here (apt install chromium)")
    with closing(Browser()) as chromium:
        yield chromium


@pytest.fixture
def refused(tmp_path, capsys):
    """refused(code, words…) → the line that a command fails with; of a replay, nothing is written."""

    def run(code, *words):
        if words[0] in ("replay", "job") and "--out" not in words:
            words = (*words, "--out", tmp_path / "out")
        line = error_line(capsys, code, *words)
        assert not (tmp_path / "out").is_dir()
        return line

    return run


@pytest.fixture
def small_blocks(monkeypatch):
    """Checkpoints are written in many blocks, one after each frame: many steps are applied during a commit."""
    monkeypatch.setattr(incremental, "BLOCK_BYTES", 64 * 4 * 8)
    monkeypatch.setattr(incremental, "COPYING_FRACTION", 1e9)


@pytest.fixture
def shared():
    """shared("golden/x.json"): a file of the recorded results."""
    return recorded


@pytest.fixture(scope="session")
def ulp():
    """bench/experiments/ulp.py: its grid of rules, its measure and its bounds are those asserted here."""
    return loaded("bench/experiments/ulp.py")
