"""Many processes: the same bits as one, whatever the number of processes and devices. Members are threads here."""

import pytest
from checkpoints import batch, config_of, engine_of, write
from jobs import replayed


@pytest.fixture
def logs(tmp_path):
    return [write(tmp_path / f"{n}.arrows", [batch(step, n) for step in range(8)]) for n in range(3)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_job_ends_as_one_process_does(logs, count):
    engine = engine_of()
    report = engine.run(logs, merge="round", flush=True)
    results = replayed(count, config_of(), logs, engine={"num_required": 3}, flush=True)
    assert {digest for digest, _ in results} == {engine.state_hash()}
    for _, got in results:
        assert (got.rows, got.frames, got.steps, got.stale) == (report.rows, report.frames, report.steps, report.stale)
        assert got.tables == report.tables
