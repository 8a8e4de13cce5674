"""``penstock job``: its flags, and the clusters that it finds or starts."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from checkpoints import batch, config_of
from ipc import write

from penstock.contrib.ray.cluster import started


@pytest.fixture
def line(tmp_path):
    config_of().save(tmp_path / "c.pbtxt")
    return ["job", tmp_path / "c.pbtxt", write(tmp_path / "0.arrows", [batch(0)])]


def test_flags_that_a_job_lacks_are_exit_2(line, refused):
    assert refused(2, *line) == "penstock: give the number of shares, --shares N\n"
    assert "--every: name a checkpoint" in refused(2, *line, "--shares", 2, "--every", 3)


def test_a_job_without_ray_installed_says_how_to_install_it(line, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "needs Ray: pip install 'penstock[ray]'" in refused(2, *line, "--shares", 2)


def test_an_unreachable_cluster_is_exit_6_at_once(line, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    refusal = refused(6, *line, "--ray", "127.0.0.1:1", "--shares", 2)
    assert "penstock: no ray cluster at 127.0.0.1:1: [errno 111] connection refused" in refusal.lower()


def test_a_local_node_that_does_not_start_in_time_is_exit_6_in_one_line(line, refused, monkeypatch):
    """Ray raises a bare Exception after 30 seconds, which used to end in a traceback."""

    def init(**_):
        raise Exception("The current node timed out during startup. This could happen because some of the raylet")

    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # no warning about Ray, which is loaded here
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    refusal = refused(6, *line, "--ray", "local", "--shares", 2)
    assert "Ray started no cluster on this machine: The current node timed out during startup" in refusal
    assert "try again when the machine is less busy" in refusal


def test_a_local_cluster_has_room_for_all_actors(monkeypatch):
    value = {}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=value.update))
    started("local", 1000)
    assert (value["address"], value["num_cpus"], value["include_dashboard"]) == ("local", 1000, False)


def test_a_program_that_imported_ray_before_its_local_cluster_is_warned(monkeypatch, caplog):
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=lambda **_: None))
    started("local", 1)
    assert "imported before RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 was set" in caplog.text
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ  # later clusters of the program are as Ray makes them


def test_a_job_needs_no_library_of_metrics():
    pytest.importorskip("ray")
    code = "import sys; sys.modules['prometheus_client'] = None; import penstock.contrib.ray.job, penstock.cli.serve"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
