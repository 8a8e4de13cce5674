"""The command as a separate process: pipes, closed streams, devices, and no traceback whatever happens."""

import json
import os
import re
import subprocess

import pytest
from cli import COMMAND, frame, table
from ipc import stream
from limits import HANG_S

CONFIG = table(rows=5000) + "mode: TRAINING\n"
IDS = 500


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.arrows"
    path.write_bytes(stream([frame(step, range(IDS)) for step in range(5)]))
    return path


@pytest.fixture
def penstock(tmp_path):
    """penstock(words…, env={…}, before="shell", …) runs the command to its end."""

    def run(*words, env=None, before="", **more):
        argv = [*COMMAND, *(w if isinstance(w, bytes) else str(w) for w in words)]
        if before:
            argv = ["sh", "-c", before.replace("COMMAND", 'exec "$@"'), "sh", *argv]
        if "stdout" not in more:
            more |= {"stdout": subprocess.PIPE}
        environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")} | (env or {})
        return subprocess.run(
            argv, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, timeout=HANG_S, **more
        )

    return run


def one_line(done, code):
    """Check that the process failed as it should; its line."""
    assert done.returncode == code, done.stderr
    assert re.fullmatch("penstock: [^\n]+\n", done.stderr), done.stderr
    return done.stderr


# ---- bad input


def test_bad_standard_input_is_named(penstock, config, log):
    with open(log, "rb") as file:
        os.lseek(file.fileno(), 8, os.SEEK_SET)
        assert "<stdin>: " in one_line(penstock("replay", config, "-", stdin=file), 3)
    assert "<stdin>: " in one_line(penstock("replay", config, "-", stdin=subprocess.DEVNULL), 3)
    assert "<stdin>: " in one_line(penstock("replay", config, "-", before="COMMAND <&-"), 3)


def test_a_write_that_fails_half_way_leaves_what_was_there(penstock, config, log, tmp_path):
    assert penstock("replay", config, log, "--out", "out", "--limit", 1).returncode == 0
    before = (tmp_path / "out" / "user.parquet").read_bytes()
    done = penstock("replay", config, log, "--out", "out", before="ulimit -f 16; COMMAND")
    wanted = "out/user.parquet: cannot write: file too large; raise the limit on file sizes (ulimit -f)"
    assert one_line(done, 6) == f"penstock: {wanted}\n"
    assert done.stdout == ""
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["user.parquet"]
    assert (tmp_path / "out" / "user.parquet").read_bytes() == before


# ---- stdout


def test_a_closed_pipe_on_stdout_is_no_traceback(penstock, log):
    for words, begins in ((["inspect", log], ""), (["inspect", log, "--json"], str(log)), (["--help"], "")):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            done = penstock(*words, stdout=writing)
        finally:
            os.close(writing)
        assert done.returncode in (0, 6)  # argparse prints help without minding
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr
        assert done.stderr.startswith(begins)
        assert begins or not done.stderr


def test_a_full_disk_or_closed_stdout_is_no_traceback(penstock, log):
    with open("/dev/full", "w") as full:
        assert "No space left" in one_line(penstock("inspect", log, stdout=full), 6)
        failed = penstock("inspect", log, "--json", stdout=full)
    assert (failed.returncode, failed.stderr.count("penstock: "), "Traceback" in failed.stderr) == (6, 1, False)
    closed = penstock("inspect", log, before="COMMAND >&-")
    assert (closed.returncode, closed.stderr) == (0, "")
    silent = penstock("inspect", "nowhere.arrows", before="COMMAND 2>&-")
    assert (silent.returncode, silent.stdout, silent.stderr) == (3, "", "")


def test_names_that_are_not_utf8_are_no_traceback(penstock, config, log, tmp_path):
    odd = os.path.join(os.fsencode(tmp_path), b"caf\xe9.arrows")
    os.rename(log, odd)
    assert "caf\\udce9.arrows" in one_line(penstock("inspect", os.fsdecode(odd)), 3)
    assert "'caf\\xe9' is not UTF-8" in one_line(penstock("inspect", config, "--column", b"id=caf\xe9"), 2)
    ascii_only = penstock("inspect", config, env={"PYTHONIOENCODING": "ascii"})
    assert "5,000 \\xd7 2" in ascii_only.stdout


@pytest.mark.evidence
def test_devices_give_the_same_hash_whatever_the_environment_forces(penstock, config, log):
    forced = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    hashes = set()
    for number, env in ((1, {}), (2, {}), (3, {"JAX_PLATFORMS": "cpu"}), (2, forced), (8, forced)):
        done = penstock("replay", config, log, "--devices", number, "--json", env=env)
        assert done.returncode == 0, done.stderr
        assert "arning" not in done.stderr
        hashes.add(json.loads(done.stdout)["state_hash"])
    assert len(hashes) == 1


@pytest.mark.evidence
def test_a_missing_jax_platform_is_exit_2(penstock, config, log):
    for name in ("cuda", "abacus"):
        line = one_line(penstock("replay", config, log, env={"JAX_PLATFORMS": name}), 2)
        assert f"JAX_PLATFORMS is '{name}'" in line


# ---- devices


def test_no_progress_and_no_warnings_where_stderr_is_no_terminal(penstock, config, log):
    done = penstock("replay", config, log)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("rows      2,500 in ")
