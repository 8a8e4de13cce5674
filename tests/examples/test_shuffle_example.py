"""The example that shuffles logs by owner: shares that never meet have the state of one process."""

import subprocess
import sys

import pytest
from checkpoints import batch, config_of
from dynamic import ALL_POLICIES, churning_steps
from dynamic import config_of as dynamic_config
from dynamic import log_of as dynamic_log
from ipc import write
from scripts import ROOT

import penstock as ps


@pytest.mark.sampled("static")
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_logs_that_are_shuffled_by_owner_make_the_state_of_one_process(tmp_path, kind):
    config = config_of() if kind == "static" else dynamic_config(ALL_POLICIES, rows=16_384)
    logs = [[batch(step, n) for step in range(20 + n)] for n in range(2)]
    if kind == "dynamic":
        logs = [[dynamic_log(churning_steps(20, 9000, 300, n))] for n in range(2)]
    paths = [str(write(tmp_path / f"{n}.arrows", log)) for n, log in enumerate(logs)]
    config.save(tmp_path / "tables.pbtxt")
    engine = ps.Engine(config)
    engine.run(paths, merge="round")
    command = [sys.executable, ROOT / "examples/shuffle_by_owner.py", tmp_path / "tables.pbtxt", "3", tmp_path / "out"]
    done = subprocess.run([*command, *paths], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == engine.state_hash()
