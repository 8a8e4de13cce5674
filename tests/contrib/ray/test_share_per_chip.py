"""One share per accelerator: what a job asks of Ray, what each owner is given, and processes without Ray."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pyarrow as pa
import pytest
from checkpoints import batch, config_of
from cluster.jobs import Nodes
from ipc import write

import penstock as ps
from penstock.contrib.ray import Job
from penstock.contrib.ray.cluster import started
from penstock.contrib.ray.owners import Owner
from penstock.model.command_options import JobOptions

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

DOCS = Path(__file__).resolve().parents[3] / "docs"
VISIBLE = {"gpu": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}


@pytest.fixture(scope="module")
def cluster():
    """A node with two pretended GPUs and one with two pretended TPU chips; its processes run jax on their CPUs."""
    ray = pytest.importorskip("ray", reason="Ray is not installed", exc_type=ImportError)
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"
    with Nodes(0) as nodes:
        nodes.add(num_gpus=2)
        nodes.add(resources={"TPU": 2})
        ray.shutdown()  # a command that an earlier test ran in this process leaves its connection
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
        ray.shutdown()
    os.environ.pop("JAX_PLATFORMS")
    os.environ |= {} if before is None else {"JAX_PLATFORMS": before}


@pytest.mark.filterwarnings("default")  # Ray's own warnings
@pytest.mark.parametrize("accelerator", ["gpu", "tpu"])
def test_each_owner_is_given_one_accelerator_to_itself_also_after_it_has_died(cluster, logs, tmp_path, accelerator):
    import ray

    wanted = ps.Engine(config_of(), num_required=3)
    wanted.run(logs, merge="round", flush=True)
    job = Job(
        config_of(), logs, shares=2, num_required=3, flush=True, rounds_per_block=1, accelerator=accelerator,
        checkpoint=tmp_path / "c", every=2,
    )  # fmt: skip
    seen, killed = [], []

    def look(counters, step):
        if step in (1, 8) and len(seen) == (step == 8):
            seen.append(ray.get([owner.__ray_call__.remote(lambda _: dict(os.environ)) for owner in job.actors.owners]))
        if step == 4 and len(seen) == 1 and not killed:
            killed.append(ray.kill(job.actors.owners[1], no_restart=False))

    job.progress = look
    assert job.run().state_hash == wanted.state_hash()
    assert len(killed) == 1
    for owners in seen:
        assert sorted(owner[VISIBLE[accelerator]] for owner in owners) == ["0", "1"]
        if accelerator == "tpu":  # else libtpu would lock all chips of the host for the first process
            assert all(owner["TPU_CHIPS_PER_HOST_BOUNDS"] == owner["TPU_HOST_BOUNDS"] == "1,1,1" for owner in owners)
    assert len(seen) == 2


@pytest.mark.filterwarnings("default")
def test_a_cluster_with_fewer_accelerators_than_shares_ends_a_job_with_one_line(cluster, logs, tmp_path, refused):
    with pytest.raises(ps.PenstockError, match="3 shares need one GPU each, and the Ray cluster has 2; add nodes"):
        Job(config_of(), logs, shares=3, accelerator="gpu").run()
    config_of().save(tmp_path / "c.pbtxt")
    line = ["job", tmp_path / "c.pbtxt", *logs, "--ray", cluster.address, "--shares", 3, "--accelerator", "tpu"]
    assert "3 shares need one TPU each, and the Ray cluster has 2" in refused(6, *line)


def test_a_cluster_without_accelerators_is_refused_before_anything_starts(monkeypatch):
    stub = SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: {"CPU": 8.0})
    monkeypatch.setitem(sys.modules, "ray", stub)
    with pytest.raises(ps.PenstockError, match="2 shares need one GPU each, and the Ray cluster has 0"):
        started(None, 3, ("gpu", 2))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"accelerator": "npu"}, "accelerator: expected one of gpu, tpu, got 'npu'"),
        ({"accelerator": "gpu", "owner_options": {"num_gpus": 2}}, "accelerator='gpu' gives each owner one GPU"),
        ({"accelerator": "tpu", "owner_options": {"resources": {"TPU": 4}}}, "gives each owner one TPU; leave out"),
    ],
)
def test_an_accelerator_that_a_job_cannot_give_is_refused(logs, options, problem):
    with pytest.raises(ps.UsageError, match=problem):
        Job(config_of(), logs, shares=2, **options)


def test_an_owner_whose_jax_has_no_such_accelerator_says_so(monkeypatch):
    """Without JAX_PLATFORMS, jax on a CPU is a mistake."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    owner = Owner(JobOptions(config_of(), [], shares=2, accelerator="gpu"), 1, 0, None)
    wanted = "share 1: expected one GPU, and jax has 1 devices of platform cpu there; install jax"
    with pytest.raises(ps.ConfigError, match=f"^{wanted}"):
        owner.begin(None)


def test_an_owner_whose_jax_cannot_use_its_accelerator_says_so(monkeypatch):
    def local_devices():
        raise RuntimeError("Unable to initialize backend 'tpu': no chip\nmore about it")

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(jax, "local_devices", local_devices)
    wanted = "expected one TPU: jax finds no device: Unable to initialize backend 'tpu': no chip"
    with pytest.raises(ps.ConfigError, match=f"{wanted}$"):
        Owner(JobOptions(config_of(), [], shares=2, accelerator="tpu"), 0, 0, None).begin(None)


def test_processes_without_ray_each_see_one_chip_and_together_have_all_rows(tmp_path):
    """The page's script, for two shares; each process also prints the variables that it was started with."""
    page = (DOCS / "scaling.md").read_text()
    (script,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (program,) = re.findall(r"```text\n(# share.py.*?)```", page, re.DOTALL)
    config_of().save(tmp_path / "tables.pbtxt")
    write(tmp_path / "log.arrows", [batch(step) for step in range(12)])
    names = ["CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS"]
    code = f"import os\nprint(*(os.environ.get(name) for name in {names}))\n"
    (tmp_path / "share.py").write_text(program + code)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "JAX_PLATFORMS": "cpu"}
    script = script.replace("0 1 2 3", "0 1").replace("$rank 4", "$rank 2")
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert sorted(done.stdout.splitlines()) == ["0 0 1,1,1 1,1,1", "1 1 1,1,1 1,1,1"], done.stderr
    wanted = ps.Engine(config_of())
    wanted.run(tmp_path / "log.arrows", deltas=tmp_path / "wanted.arrows")
    rows = [rows_of(tmp_path / name) for name in ("wanted.arrows", "changed-0.arrows", "changed-1.arrows")]
    assert min(map(len, rows)) > 0
    assert sorted(rows[1] + rows[2]) == sorted(rows[0])


def rows_of(path):
    with pa.ipc.open_stream(path.read_bytes()) as reader:
        table = reader.read_all()
    return list(zip(*(table[name].to_pylist() for name in ("step", "table", "id", "row")), strict=True))
