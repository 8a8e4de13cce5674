"""Jobs on a cluster that outlives them: their sources, what one process makes of these, and drivers as processes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pyarrow as pa
from checkpoints import batch
from checkpoints import config_of as static_config
from dynamic import ALL_POLICIES, churning_steps
from dynamic import config_of as dynamic_config
from dynamic import log_of as dynamic_log
from ipc import write

import penstock as ps

DRIVER = Path(__file__).resolve().parent / "driver.py"
KINDS = ("static", "dynamic")
NUM_REQUIRED = {"static": 3, "dynamic": 2}
# Ray would start a process per CPU of every node for each driver, and run actors at niceness 15, so that they starve on
# a busy machine.
os.environ |= {"RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}
# A node has room for all actors of a job.
NODE = {"num_cpus": 8, "object_store_memory": 100 << 20}


class Sources:
    """Logs of one kind of table in a folder, and how one process ends over them.

    kind : of KINDS; num_steps : frames of each source; num_sources : how many logs
    """

    def __init__(self, folder, kind, num_steps=40, num_sources=3):
        self.folder, self.kind = Path(folder), kind
        self.config = static_config() if kind == "static" else dynamic_config(ALL_POLICIES, rows=16_384)
        self.form = {"slots": True} if kind == "static" else {"slots": True, "last": True}
        self.num_frames = num_steps * num_sources
        self.folder.mkdir(parents=True, exist_ok=True)
        self.logs = []
        for n in range(num_sources):
            path = self.folder / f"{kind}{n}.arrows"
            steps = churning_steps(num_steps, 9000, 300, n)
            log = [batch(step, n) for step in range(num_steps)] if kind == "static" else [dynamic_log(steps)]
            self.logs.append(str(write(path, log)))

    def alone(self, name, limit=None):
        """Run one process, with a stop after ``limit`` frames and a resumption. Returns its hash and its deltas."""
        deltas, commits = (self.folder / f"{self.kind}-{name}.{kind}" for kind in ("deltas", "commits"))
        options = {"merge": "round", "deltas": deltas, "checkpoint": commits, **self.form}
        engine = ps.Engine(self.config, num_required=NUM_REQUIRED[self.kind])
        if limit is not None:
            engine.run(self.logs, limit=limit, **options)
            engine, options["resume"] = ps.Engine.restore(commits), True
        engine.run(self.logs, flush=True, **options)
        return engine.state_hash(), deltas


def batches_of(path):
    """The batches of a file of deltas; one that was continued repeats its dictionary, so that its bytes differ."""
    with pa.ipc.open_stream(path.read_bytes()) as reader:
        return list(reader)


class Nodes:
    """A Ray cluster of a head, where drivers connect, and nodes on which actors run. A context."""

    def __init__(self, num_nodes):
        self._num, self._stack = num_nodes, ExitStack()
        self.nodes = []

    def __enter__(self):
        from ray.cluster_utils import Cluster

        folder = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir="/tmp"))
        before = os.environ.get("RAY_TMPDIR")
        self._stack.callback(lambda: os.environ.update(RAY_TMPDIR=before) if before else os.environ.pop("RAY_TMPDIR"))
        os.environ["RAY_TMPDIR"] = folder
        os.mkdir(f"{folder}/ray")
        head = {**NODE, "num_cpus": 0, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self._stack.callback(self.cluster.shutdown)
        for _ in range(self._num):
            self.add()
        return self

    def __exit__(self, *_):
        self._stack.close()

    @property
    def address(self):
        return self.cluster.address

    def add(self, **more):
        self.nodes.append(self.cluster.add_node(**NODE, **more))

    def lose(self, number):
        """Kill all processes of a node at once, and add another node."""
        node = self.nodes.pop(number)
        kill_node(self.cluster, node)
        self.add()


def kill_node(cluster, node):
    """Kill a node with its workers, which would otherwise work on until they notice that their node is gone."""
    (raylet,) = (item.process.pid for item in node.all_processes["raylet"])
    workers = [int(child) for child in Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()]
    for process in workers:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


class DriverProcess:
    """A driver, which reports what it has applied. kills : (step, "reader" or "owner", its number, delay in s)

    pace_s : between two blocks, at least
    """

    def __init__(self, address, sources, kills=(), pace_s=0.0, **options):
        settings = {
            "address": address,
            "kind": sources.kind,
            "logs": sources.logs,
            "kills": list(kills),
            "pace_s": pace_s,
        }
        settings["options"] = {"num_required": NUM_REQUIRED[sources.kind], "flush": True, **sources.form, **options}
        environment = {**os.environ, "RAY_ADDRESS": address, "RAY_USAGE_STATS_ENABLED": "0"}
        self.process = subprocess.Popen(
            [sys.executable, DRIVER, json.dumps(settings)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip

    def events(self):
        """Yield what the driver reports: {"step": n}, {"killed": …} or, at the end, {"state_hash": …}."""
        for line in self.process.stdout:
            yield json.loads(line)

    def end(self):
        """Wait, and return the exit code and the lines that a user saw."""
        lines = self.process.stderr.read().splitlines()
        return self.process.wait(), lines
