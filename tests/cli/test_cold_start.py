"""What a command loads before it works, and what it keeps for the next time."""

import os
import subprocess
import sys

import pyarrow as pa
import pytest
from cli import COMMAND, table
from ipc import write

from penstock.cli.compile_cache import compile_cache

HEAVY = ("jax", "jaxlib", "numpy", "pyarrow", "google.protobuf", "prometheus_client", "shtab")
CONFIG = table(rows=8) + "mode: TRAINING\n"


def loaded_by(*words):
    """Which of the heavy modules ``penstock words…`` loads."""
    code = (
        f"import sys; from penstock.cli import main; main({list(words)}); print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split()) & set(HEAVY)


def test_importing_penstock_loads_no_library_and_no_other_module_of_it():
    code = "import sys; before = set(sys.modules); import penstock; print(*(sys.modules.keys() - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name for name in done.stdout.split() if name not in sys.stdlib_module_names} == {"penstock"}


@pytest.mark.parametrize("word", ["--help", "--version", "repaly"])
def test_help_version_and_a_misspelt_command_load_nothing_heavy(word):
    assert loaded_by(word) == set()


def test_a_commands_help_does_without_jax():
    assert not loaded_by("replay", "--help") & {"jax", "jaxlib", "prometheus_client", "shtab"}


@pytest.fixture
def replay(tmp_path, config):
    """replay(NAME=value…) replays an empty log by XLA in a separate process, with those in its environment."""
    schema = pa.schema([("id", pa.int64()), ("gradient", pa.list_(pa.float32(), 2))])
    write(tmp_path / "log.arrows", [], schema=schema)

    def run(**environment):
        command = [*COMMAND, "replay", config, "log.arrows"]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "PENSTOCK_", "XDG_"))}
        environment = inherited | {"HOME": str(tmp_path), "PENSTOCK_VARIANT": "xla"} | environment
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()[-1]

    return run


def programs(folder):
    return [path for path in folder.rglob("*-cache") if path.is_file()]


def test_compiled_programs_are_kept_in_the_users_cache_and_used_again(replay, tmp_path):
    state = replay()
    kept = programs(tmp_path / ".cache" / "penstock")
    assert kept
    times = {path: path.stat().st_mtime_ns for path in kept}
    assert replay() == state
    assert {path: path.stat().st_mtime_ns for path in programs(tmp_path / ".cache" / "penstock")} == times


@pytest.mark.evidence
def test_environment_variables_set_the_folder_of_the_compile_cache(replay, tmp_path):
    replay(XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert programs(tmp_path / "xdg" / "penstock")
    replay(PENSTOCK_COMPILE_CACHE=str(tmp_path / "mine"))
    assert programs(tmp_path / "mine")
    replay(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "jax"), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="60")
    assert (tmp_path / "jax").is_dir()
    assert not programs(tmp_path / "jax")
    assert not (tmp_path / ".cache").exists()


@pytest.mark.evidence
@pytest.mark.parametrize("setting", ["off", "/proc/no/such/folder"])
def test_without_a_cache_it_works_all_the_same(setting, replay, tmp_path):
    assert replay(PENSTOCK_COMPILE_CACHE=setting).startswith("state ")
    assert not (tmp_path / ".cache").exists()


@pytest.mark.parametrize("setting", ["off", "0", ""])
def test_several_values_turn_the_compile_cache_off(setting, monkeypatch):
    monkeypatch.setenv("PENSTOCK_COMPILE_CACHE", setting)
    assert compile_cache() is None


@pytest.mark.evidence
def test_a_cache_full_of_rubbish_is_no_cache(replay, tmp_path):
    state = replay()
    for path in programs(tmp_path):
        path.write_bytes(b"rubbish")
    assert replay() == state
