"""Jobs on a cluster that outlives them: a sample of what ``make cluster`` runs in full."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = pytest.importorskip("ray", reason="Ray is not installed", exc_type=ImportError)

TESTS = Path(__file__).resolve().parent
pytestmark = pytest.mark.filterwarnings("default")  # Ray's own warnings


def run(script, *options):
    """Run a script of tests/cluster, which prints what failed and ends with 1 if anything did."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, TESTS / "cluster" / script, *map(str, options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("number", [0, 1])
def test_a_job_that_loses_a_reader_an_owner_a_node_and_its_driver_ends_as_one_process_does(number):
    """Static tables, then dynamic ones."""
    assert "4 kills" in run("kills.py", "--rounds", 1, "--first", number)


def test_jobs_that_are_resumed_with_other_shares_have_the_deltas_of_one_process():
    out = run("matrix.py", "--nodes", 2, "--shares", 3, "--readers", 2, "--resumes", 1)
    assert "4 cases, 0 failed" in out
