"""Frames that pass in native runs, while readers read the rows: no torn row, and one step if they ask for it."""

import threading

import numpy as np
import pyarrow as pa
import pytest
from batches import batch

import penstock as ps
from penstock.core.engine_core import EngineCore
from penstock.rows.bridge.devices import HostMesh

ROWS, DIM, FRAMES, CALLS = 4000, 24, 32, 150
# Each in another page.
IDS = np.arange(0, ROWS, ROWS // 50)


def log_of(first):
    """Frames in which every id has a gradient of 1."""
    ids = np.tile(IDS, FRAMES)
    steps = np.repeat(np.arange(first, first + FRAMES), len(IDS))
    return batch(ids, np.ones((len(ids), DIM), np.float32), DIM, step=pa.array(steps))


@pytest.fixture
def engine(tmp_path, monkeypatch, request):
    """An engine whose weights are the number of the step, and the numbers of its frames that passed together."""
    table = ps.TableConfig(ROWS, DIM, ps.Constant(0.0), ps.SGD(-1.0), name="t")
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), HostMesh(request.param), shared=tmp_path, threads=2)
    engine.passed, push_native = [], EngineCore._push_native

    def push(self, *arguments):
        pushed = push_native(self, *arguments)
        engine.passed.append(0 if pushed is None else pushed.num_frames)
        return pushed

    monkeypatch.setattr(EngineCore, "_push_native", push)
    return engine


@pytest.mark.parametrize("engine", [1, 3], indirect=True)
def test_no_row_is_torn_or_of_two_steps_while_frames_pass_in_native_runs(engine, tmp_path):
    errors, num_reads, has_ended = [], {False: 0, True: 0}, threading.Event()

    def watch(reads, consistent):
        try:
            while not has_ended.is_set():
                try:
                    rows = reads.lookup({"t": IDS}, consistent=consistent, timeout_ms=10_000)
                    step = rows.version.step
                except ps.ReadTimeoutError:
                    continue
                assert (rows["t"] == rows["t"][:, :1]).all(), "a torn row"
                assert (rows["t"] >= step).all(), "an old row"
                assert not consistent or (rows["t"] == step).all(), "rows of several steps"
                num_reads[consistent] += 1
        except BaseException as error:
            errors.append(error)

    reader = ps.Reader(tmp_path)
    watches = [(reader, False), (engine.reads, False), (reader, True), (engine.reads, True)]
    threads = [threading.Thread(target=watch, args=arguments) for arguments in watches]
    for thread in threads:
        thread.start()
    for number in range(CALLS):
        engine.run(iter([log_of(number * FRAMES)]))
    has_ended.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert min(num_reads.values()) > 0
    assert max(engine.passed) == FRAMES - 1  # the last frame of a batch might have continued
    assert reader.version.step == engine.global_step == CALLS * FRAMES
    assert np.array_equal(reader.lookup("t", IDS, consistent=True), engine.lookup("t", IDS))


@pytest.mark.parametrize("engine", [1], indirect=True)
def test_counters_of_threads_survive_runs_after_a_step_of_many_rows(engine, tmp_path):
    reader = ps.Reader(tmp_path)
    for first in (0, FRAMES + 1):
        engine.run(iter([log_of(first)]))
        engine.apply({"t": (np.arange(ROWS).repeat(2), np.ones((2 * ROWS, DIM), np.float32) / 2)})
    assert np.array_equal(reader.lookup("t", IDS, consistent=True), engine.lookup("t", IDS))
    assert reader.version.step == 2 * (FRAMES + 1)
