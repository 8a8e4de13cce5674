"""How many passes a replay takes, by the memory that it may use; and that it stays within its limit."""

import os
import re
import resource
import sys
from collections import namedtuple

import pytest
from commands_below import below

import penstock as ps
from penstock.base import control_groups
from penstock.contrib.passes import pass_memory as memory

GB, MB = 10**9, 10**6
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(files…): these are the files of /proc and /sys/fs/cgroup. The process uses 100 MB of 64 GB, unlimited."""
    usual = {"/proc/meminfo": "MemTotal: 1\nMemAvailable: 62500000 kB\n", "/proc/self/cgroup": "0::/\n"}
    usual["/proc/self/status"] = "VmData:\t  100000 kB\nRssAnon:\t 50000 kB\n"

    def set_up(**files):
        actual = usual | {name.replace("__", "/"): text for name, text in files.items()}
        for module in (memory, control_groups):
            monkeypatch.setattr(module, "lines_of", lambda path: actual.get(str(path), "").splitlines())

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    set_up()
    return set_up


def tables_of(rows, dim=32):
    """Tables whose rows have 264 bytes with their slot."""
    return ps.EmbeddingConfig.from_tables([ps.TableConfig(rows, dim, name="t")], ps.Adagrad(0.1)).tables


def test_free_memory_decides_where_nothing_limits_the_process(machine):
    assert memory.num_passes(tables_of(1_000_000), None) == 1
    assert memory.num_passes(tables_of(1_000_000_000), None) == 6  # 261 GB in three quarters of 64 GB


def test_the_least_of_all_limits_decides(machine, monkeypatch):
    specs = tables_of(40_000_000)  # 10.4 GB
    assert memory.num_passes(specs, None) == 1
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8 * GB, 9 * GB))
    assert memory.num_passes(specs, None) == 2
    group = {"__proc__self__cgroup": "0::/job/step\n", "__sys__fs__cgroup__job__memory.current": f"{GB}\n"}
    group |= {
        "__sys__fs__cgroup__job__step__memory.max": "max\n",
        "__sys__fs__cgroup__job__step__memory.current": "9\n",
    }
    machine(**group, __sys__fs__cgroup__job__memory_max="")
    assert memory.num_passes(specs, None) == 2
    machine(**group, **{"__sys__fs__cgroup__job__memory.max": f"{5 * GB}\n"})
    assert memory.num_passes(specs, None) == 4


def test_a_cgroup_of_version_1_counts_too(machine):
    folder = "__sys__fs__cgroup__memory__docker__a__memory"
    limits = {f"{folder}.limit_in_bytes": f"{3 * GB}\n", f"{folder}.usage_in_bytes": f"{GB}\n"}
    machine(__proc__self__cgroup="5:cpu:/docker/a\n4:memory:/docker/a\n", **limits)
    assert memory.num_passes(tables_of(40_000_000), None) == 8


def test_a_given_number_of_bytes_overrides_the_limits(machine, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (GB, GB))
    assert memory.num_passes(tables_of(40_000_000), 20 * GB) == 1
    assert memory.num_passes(tables_of(40_000_000), 2 * GB) == 8


def test_dynamic_tables_count_with_their_directories(machine):
    table = ps.TableConfig(40_000_000, 32, name="t", dynamic=ps.Dynamic())
    dynamic = ps.EmbeddingConfig.from_tables([table], ps.Adagrad(0.1)).tables
    assert memory.num_passes(dynamic, 8 * GB) > memory.num_passes(tables_of(40_000_000), 8 * GB)


def test_too_little_memory_for_any_number_of_passes_is_one_clear_error(machine):
    problem = (
        "--passes auto: 49 MB are free for tables of 10,440 MB, and everything but rows needs 121 MB; raise the limit"
    )
    with pytest.raises(ps.CapacityError, match=problem):
        memory.num_passes(tables_of(40_000_000), 100 * MB)


def test_the_ring_buffer_of_commits_takes_its_room_from_the_rows(machine):
    """78 MB of rows in three quarters of 105 MB, next to 51 MB in use, 101 MB for everything else, a ring of 34 MB."""
    assert memory.num_passes(tables_of(300_000), 291 * MB) == 1
    assert memory.num_passes(tables_of(300_000), 289 * MB) == 2


def test_memory_below_what_the_process_uses_already_is_one_clear_error(machine):
    """The message used to say that -51 MB were free."""
    with pytest.raises(ps.CapacityError, match=r"--memory 1000: the process uses 51 MB before it has a row; give more"):
        memory.num_passes(tables_of(1000), 1000)


def test_a_disk_without_room_for_the_rows_is_reported_before_the_first_pass(tmp_path, call, monkeypatch):
    call(0, "synth", tmp_path / "log.arrows", "--rows", 90, "--rows-per-step", 30, "--vocabulary", 1000, "--dim", 8)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: Usage(9 * MB, 9 * MB, 0))
    words = ["passes", tmp_path / "log.pbtxt", tmp_path / "log.arrows", "--passes", 2]
    text = call(6, *words, "--checkpoint", tmp_path / "c")[0]
    assert f"{tmp_path}/c: the rows of all passes need 0 MB of disk, and 0 MB are free; free some space" in text
    assert not (tmp_path / "c").exists() or sorted(os.listdir(tmp_path / "c")) == [".lock"]
    monkeypatch.undo()
    call(0, *words, "--checkpoint", tmp_path / "c")


@pytest.fixture
def replay_below(tmp_path):
    """replay_below(bytes, flags…, command=) → the first two words of every line that a replay of log.arrows prints."""

    def run(limit, *flags, command="replay"):
        done = below(limit, command, tmp_path / "log.pbtxt", tmp_path / "log.arrows", "--threads", "1", *flags)
        assert done.returncode == 0, done.stderr
        return {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}

    return run


@pytest.mark.evidence
@pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are Linux's")
def test_a_table_larger_than_the_limit_of_memory_is_replayed_below_it(tmp_path, call, replay_below):
    log = ["synth", tmp_path / "log.arrows", "--rows", 20_000, "--rows-per-step", 4000]
    call(0, *log, "--vocabulary", 2_300_000, "--dim", 32)  # 589 MB
    whole = replay_below(64 * GB)
    passes = replay_below(400 * MB, "--checkpoint", tmp_path / "c", command="passes")
    assert passes["state"] == whole["state"]
    assert int(passes["passes"]) > 3


@pytest.mark.evidence
@pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are Linux's")
def test_directories_larger_than_the_limit_of_memory_are_hashed_and_written_below_it(tmp_path, call, replay_below):
    """The directories of all passes used to be in memory at the end of the replay, after it had committed."""
    log = ["synth", tmp_path / "log.arrows", "--rows", 20_000, "--rows-per-step", 4000, "--ids", "hashed"]
    call(0, *log, "--vocabulary", 12_000_000, "--dim", 1, "--distribution", "uniform")  # directories of 564 MB
    whole = replay_below(64 * GB, "--out", tmp_path / "whole")
    flags = ("--checkpoint", tmp_path / "c", "--out", tmp_path / "passes")
    passes = replay_below(400 * MB, *flags, command="passes")
    assert passes["state"] == whole["state"]
    assert int(passes["passes"]) > 3
    files = [tmp_path / name / "table_0.parquet" for name in ("whole", "passes")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.evidence
@pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are Linux's")
def test_a_limit_of_memory_that_is_too_low_is_exit_6_in_one_line(tmp_path, call, monkeypatch):
    """The message named no table."""
    log = tmp_path / "log.arrows"
    call(0, "synth", log, "--rows", 2000, "--vocabulary", 2_300_000, "--dim", 32)  # 589 MB
    monkeypatch.setenv("PENSTOCK_VARIANT", "host")
    done = below(400 * MB, "replay", tmp_path / "log.pbtxt", log, "--threads", "1")
    assert (done.returncode, done.stderr.count("\n")) == (6, 1), done.stderr[:2000]
    problem = r"no room for table 'table_0' with slots \(Cannot allocate memory\);.*penstock passes"
    assert re.match(f"penstock: out of memory: {problem}", done.stderr)
