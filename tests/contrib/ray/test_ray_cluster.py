"""Jobs on a cluster that outlives them: a sample of what ``make cluster`` runs in full."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import batch, config_of
from cli import started
from ipc import write
from limits import HANG_S, until

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = pytest.importorskip("ray", reason="Ray is not installed", exc_type=ImportError)

TESTS = Path(__file__).resolve().parents[2] / "support"
pytestmark = pytest.mark.filterwarnings("default")  # Ray's own warnings


def run(script, *options):
    """Run a script of tests/cluster, which prints what failed and ends with 1 if anything did."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, TESTS / "cluster" / script, *map(str, options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.evidence
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.promise("No way to scale changes a bit")
def test_a_job_that_loses_a_reader_an_owner_a_node_and_its_driver_ends_as_one_process_does(number):
    """Static tables, then dynamic ones."""
    assert "4 kills" in run("kills.py", "--rounds", 1, "--first", number)


@pytest.mark.evidence
def test_jobs_that_are_resumed_with_other_shares_have_the_deltas_of_one_process():
    out = run("matrix.py", "--nodes", 2, "--shares", 3, "--readers", 2, "--resumes", 1)
    assert "4 cases, 0 failed" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_driver_commits_what_is_applied_and_is_exit_130(tmp_path, number):
    """Ray replaces the handler of SIGTERM, whose dump of the process used to end the job."""
    config_of().save(tmp_path / "c.pbtxt")
    log = write(tmp_path / "0.arrows", [batch(step) for step in range(3000)])
    words = ["--ray", "local", "--shares", 1, "--checkpoint", tmp_path / "c", "--every", 1]
    driver = started("job", tmp_path / "c.pbtxt", log, *words)
    until(lambda: any((tmp_path / "c").glob("*.commit")) or driver.poll() is not None)
    driver.send_signal(number)
    _, errors = driver.communicate(timeout=HANG_S)
    assert (driver.returncode, errors.decode()) == (130, "penstock: interrupted\n")


LISTENING = """
import json, logging
from penstock.contrib.ray.cluster import started

ray = started("local", 1)
import psutil  # perhaps the one that Ray brings along

worker = ray.remote(type("Worker", (), {"answer": lambda self: 1})).remote()
ray.get(worker.answer.remote())
process = psutil.Process()
found = [
    address.laddr.ip
    for each in (process, *process.children(recursive=True))
    for address in each.net_connections()
    if address.status == psutil.CONN_LISTEN
]
print(json.dumps(found))
"""


def test_every_process_of_a_local_cluster_listens_on_this_machine_alone():
    pytest.importorskip("psutil")
    done = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    addresses = json.loads(done.stdout)
    assert len(addresses) > 4
    assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
