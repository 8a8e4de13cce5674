"""Threads that share out tasks."""

import subprocess
import sys
import threading
import time

import pytest

from penstock.base import control_groups, threads
from penstock.base.threads import ThreadTeam


def test_an_error_is_raised_after_the_last_task_has_ended():
    crew, ended = ThreadTeam(3), []

    def fails(together):
        together.wait()
        raise MemoryError

    def goes_on(together):
        together.wait()
        time.sleep(0.01)
        ended.append(True)
        return True

    for turn in range(1, 21):  # the scheduler decides which thread continues
        together = threading.Barrier(3)
        with pytest.raises(MemoryError):
            crew.run([lambda position=together, task=task: task(position) for task in (fails, fails, goes_on)])
        assert len(ended) == turn
    crew.close()


AT_EXIT = """
import atexit, threading, time
import numpy as np
import penstock as ps

table = ps.TableConfig(20_000, 2, ps.Constant(1.0), ps.SGD(1.0), name="t")
engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), threads=3)
rows = np.arange(20_000), np.ones((20_000, 2), np.float32)

def train():
    threading.main_thread().join()
    time.sleep(0.1)
    engine.apply({"t": rows})

atexit.register(lambda: print(engine.global_step, engine.lookup("t", rows[0]).sum()))
threading.Thread(target=train).start()
"""


def test_an_engine_works_while_python_exits():
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1 0.0\n", "")


V1, V2 = "4:memory:/a\n3:cpu,cpuacct:/a/b\n0::/\n", "0::/a/b\n"


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        (V2, {"a/b/cpu.max": "150000 100000"}, 1.5),
        (V2, {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000", "cpu.max": "800000 100000"}, 0.5),
        (V2, {"cpu.max": "200000 100000"}, 2.0),  # in a container
        (V2, {"a/b/cpu.max": "max 100000"}, None),
        (V2, {}, None),
        (V1, {"cpu,cpuacct/a/b/cpu.cfs_quota_us": "300000", "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000"}, 3.0),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 3.0),
        (V1, {"cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000"}, None),
        (V1, {"memory/a/cpu.cfs_quota_us": "1", "memory/a/cpu.cfs_period_us": "1"}, None),
        ("", {"cpu.max": "100000 100000"}, None),
    ],
)
def test_the_quota_of_control_groups_limits_the_threads(groups, files, quota, monkeypatch):
    texts = {f"/sys/fs/cgroup/{name}": text for name, text in files.items()} | {"/proc/self/cgroup": groups}
    monkeypatch.setattr(control_groups, "lines_of", lambda path: texts.get(str(path), "").splitlines())
    assert control_groups.cpu_quota() == quota
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert threads.num_threads(None) == {None: 8, 0.5: 1, 1.5: 2}.get(quota, quota)
    assert threads.num_threads(5) == 5
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert threads.num_threads(None) == 1
