"""Checkpoints of several processes: restored in one process, and in any number of shares.

tests/data/checkpoint_distributed was written by ``replay --distributed``, which shares replace: a configuration, two
logs, and the commits of two processes with ``--num-required 2 --seed 5 --every 2 --limit 11``. A frame is in the gate.
"""

from pathlib import Path

import pytest
from sharing import LocalJob

import penstock as ps

KEPT = Path(__file__).resolve().parent / "data" / "checkpoint_distributed"
LOGS = [str(KEPT / f"{number}.arrows") for number in range(2)]
RESTORED = "99a5534146ab10bf52364396d7dca651582a13a8056f55ad835bd6ed3800bfaa"
WHOLE = "27040afd635f6834d34eb872f9ed917b423d5c057450999f18acdaa6547ef542"  # after all of the logs


def test_one_process_restores_it_and_continues():
    engine = ps.Engine.restore(KEPT / "commits")
    assert engine.state_hash() == RESTORED
    assert engine.run(LOGS, merge="round", resume=True).skipped == 11
    assert engine.state_hash() == WHOLE


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shares_restore_it_and_continue(count, tmp_path):
    config = ps.EmbeddingConfig.load(KEPT / "tables.pbtxt")
    job = LocalJob(config, count, KEPT / "commits")
    assert job.state_hash() == RESTORED
    job.run(LOGS)
    assert job.state_hash() == WHOLE
    job.commit(tmp_path)
    assert ps.Engine.restore(tmp_path).state_hash() == WHOLE
