"""``replay --ray``: flags that exclude each other, and the script that restarts one process."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import batch, config_of
from ipc import write

from penstock.shares.ray.cluster import started

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ray.md"


@pytest.fixture
def line(tmp_path):
    config_of().save(tmp_path / "c.pbtxt")
    return ["replay", tmp_path / "c.pbtxt", write(tmp_path / "0.arrows", [batch(0)])]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--shares", 2], "--shares: belongs to a job on a cluster: --ray ADDRESS"),
        (["--readers", 2], "--readers: belongs to a job on a cluster: --ray ADDRESS"),
        (["--ray", "auto"], "--ray: give the number of shares, --shares N"),
        (["--ray", "auto", "--shares", 2, "--devices", 2], "--devices: not with --ray"),
        (["--ray", "auto", "--shares", 2, "--report", "r"], "--report: not with --ray"),
        (["--ray", "auto", "--shares", 2, "--merge", "step"], "--ray: takes a frame of each source in turn"),
        (["--ray", "auto", "--shares", 2, "--deltas", "d", "--deltas-per", "rows=3"], "--deltas-per: with --ray"),
        (["--ray", "auto", "--shares", 2, "--every", 3], "--every: name a checkpoint"),
    ],
)
def test_flags_that_do_not_fit_a_job_are_exit_2(line, refused, flags, problem):
    assert problem in refused(2, *line, *flags)


def test_a_job_without_ray_installed_says_how_to_install_it(line, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "needs Ray: pip install 'penstock[ray]'" in refused(2, *line, "--ray", "auto", "--shares", 2)


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
