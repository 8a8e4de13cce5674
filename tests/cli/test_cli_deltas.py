"""``replay --deltas``: a log of the changes, in addition to everything else that a run writes."""

import json
import os
import subprocess
import sys
import threading

import pyarrow as pa
import pyarrow.ipc
import pytest
from checkpoints import LOG, config_of, engine_of
from cli import COMMAND
from deltas import bytes_of, example
from ipc import write

from penstock.cli import main

CONFIG = config_of()


@pytest.fixture
def log(tmp_path):
    return write(tmp_path / "log.arrows", LOG)


def replay(config, log, *flags):
    return main(["replay", str(config), log, "--num-required", "3", *map(str, flags)])


def batches_of(file):
    with pa.ipc.open_stream(file) as batches:
        return [batch for batch in batches if batch.num_rows]


def wanted(**options):
    return bytes_of(engine_of().stage(LOG, numbered=True, **options))


@pytest.mark.promise("The first tables and all deltas give the last tables")
def test_base_and_deltas_give_what_out_has(config, log, tmp_path, capsys):
    base, out, copy, deltas = (tmp_path / name for name in ("base", "out", "copy", "deltas.arrows"))
    assert replay(config, log, "--limit", 0, "--out", base) == 0
    assert replay(config, log, "--deltas", deltas, "--delta-slots", "all", "--out", out, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["deltas"] == str(deltas)
    done = subprocess.run(
        [sys.executable, example.__file__, base, deltas, copy], capture_output=True, text=True, check=True
    )
    assert done.stdout == "step 12: 12 deltas applied, 0 known already\n"
    assert main(["diff", str(out), str(copy)]) == 0


def test_flags_say_what_deltas_hold_and_how_often_they_come(config, log, tmp_path, capsys):
    replay(config, log, "--deltas", tmp_path / "a", "--delta-slots", "accumulators", "--delta-steps", 5)
    assert bytes_of(batches_of(tmp_path / "a")) == wanted(slots=True, per_steps=5)
    replay(config, log, "--deltas", tmp_path / "b", "--delta-rows", 100)
    assert bytes_of(batches_of(tmp_path / "b")) == wanted(per_rows=100)
    assert f"wrote     {tmp_path / 'b'}: the deltas up to step 12" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "b")]) == 0
    assert "log with checksums" in capsys.readouterr().out


def test_deltas_stream_to_standard_output_and_text_goes_to_stderr(config, log):
    command = [*COMMAND, "replay", config, log, "--num-required", "3", "--deltas", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert bytes_of(batches_of(pa.BufferReader(done.stdout))) == wanted()
    assert b"frames    36: 12 steps" in done.stderr


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--delta-slots", "all"], 2, "--delta-slots: name a file for deltas: --deltas FILE"),
        (["--delta-steps", "2"], 2, "--delta-steps: name a file for deltas"),
        (["--deltas", "d", "--delta-rows", "0"], 2, "--delta-rows: expected at least 1, got 0"),
        (["--deltas", "d", "--delta-seconds", "-1"], 2, "--delta-seconds: expected seconds, at least 0, got '-1'"),
        (["--deltas", "d", "--delta-slots", "momenta"], 2, "no table has a slot 'momenta'"),
        (["--deltas", "-", "--json"], 2, "both want standard output"),
        (["--deltas", "-", "--checkpoint", "c"], 2, "with --checkpoint deltas go into a file"),
        (["--deltas", "nosuch://x"], 2, "nosuch://x"),
        (["--deltas", "there"], 2, "there: exists; it is never written over"),
        (["--deltas", "there/d"], 6, "there: cannot write: is not a directory"),
        (["--deltas", "/dev/full"], 6, "/dev/full: cannot write: no space left on device; free some space"),
    ],
)
def test_wrong_delta_flags_are_one_line_and_the_right_exit_code(
    config, log, tmp_path, monkeypatch, capsys, flags, code, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("mine")
    assert replay(config, log, *flags) == code
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
    assert not (tmp_path / "d").exists()


def test_a_broken_pipe_of_deltas_is_one_line(config, log, tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: pipe.open("rb", buffering=0).close())
    reader.start()
    assert replay(config, log, "--deltas", pipe) == 6
    reader.join()
    assert capsys.readouterr().err == f"penstock: {pipe}: cannot write: broken pipe; its reader has closed it\n"
