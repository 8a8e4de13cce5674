"""``replay --checkpoint``: committed whatever ends the run, and continued by the same command."""

import os
import re
import signal

import pytest
from checkpoints import LOG, ROWS, commits, config_of
from cli import started
from ipc import write
from limits import HANG_S, until

import penstock as ps
from penstock.checkpoint.store import Folder
from penstock.cli import main

CONFIG = config_of()


@pytest.fixture
def replay(config, tmp_path, call):
    """replay(flags…) → the report of --json; with code=: the error's text"""

    def run(*flags, source=None, code=0):
        source = source or write(tmp_path / "log.arrows", LOG)
        text, report = call(code, "replay", config, source, "--num-required", 3, *flags)
        assert text.count("penstock: ") == bool(code)
        return report["error"] if code else report

    return run


def test_the_same_command_starts_resumes_and_finishes_a_run(replay, tmp_path):
    whole = replay("--flush", "--seed", 3)
    line = ["--seed", 3, "--checkpoint", tmp_path / "c", "--every", 2, "--resume"]
    first = replay(*line, "--limit", 10)
    line.append("--flush")
    assert (first["skipped"], first["frames"]) == (0, 10)
    second = replay(*line)
    assert (second["skipped"], second["frames"], second["state_hash"]) == (10, 26, whole["state_hash"])
    third = replay(*line)
    assert (third["skipped"], third["frames"], third["state_hash"]) == (36, 0, whole["state_hash"])


@pytest.mark.parametrize("flag", [["--every", "3"], ["--resume"]])
def test_every_and_resume_need_checkpoint(replay, flag):
    assert "name a checkpoint: --checkpoint DIR" in replay(*flag, code=2)


def test_a_truncated_log_is_resumed_when_it_has_grown(replay, tmp_path):
    source = write(tmp_path / "cut.arrows", LOG[:17], end=False)
    assert "no end marker" in replay("--checkpoint", tmp_path / "c", "--resume", source=source, code=3)
    # The last frame of a source that has no end is not known to be whole.
    assert replay("--checkpoint", tmp_path / "c", "--resume")["skipped"] == 16


def test_another_configuration_another_gate_and_a_damaged_file_are_exit_5(replay, tmp_path, config):
    line = ["--checkpoint", tmp_path / "c", "--resume"]
    replay(*line)
    assert "made with num_required 3, not 4" in replay(*line, "--num-required", 4, code=5)
    config_of(rows=ROWS - 1).save(config)
    assert "a table may grow, not shrink" in replay(*line, code=5)
    config_of().save(config)
    (tmp_path / "c" / "00000001.base").write_bytes(b"")
    assert f"{tmp_path}/c/00000001.base: 0 bytes" in replay(*line, code=5)


def test_an_unwritable_checkpoint_is_an_error_before_the_run(replay, tmp_path):
    (tmp_path / "file").write_text("")
    assert "a checkpoint is a folder, this is a file" in replay("--checkpoint", tmp_path / "file", code=2)
    assert "is not a directory" in replay("--checkpoint", tmp_path / "file" / "c", code=6)


def test_the_report_for_people_names_the_resumed_position_and_the_commit(replay, config, tmp_path, capsys):
    replay("--checkpoint", tmp_path / "c", "--limit", 9)
    line = ["replay", str(config), str(tmp_path / "log.arrows"), "--checkpoint", str(tmp_path / "c"), "--resume"]
    assert main(line) == 0
    out = capsys.readouterr().out
    assert "resumed   after 9 frames, step 3\n" in out
    assert f"committed {tmp_path}/c, step 12\n" in out


@pytest.mark.promise("A signal ends a command after a whole frame, which it commits")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_frame_commits_and_reports_it(config, tmp_path, replay, number):
    folder, log = tmp_path / "c", write(tmp_path / "log.arrows", LOG)
    content = (tmp_path / "log.arrows").read_bytes()
    line = ["replay", config, "-", "--num-required", "3", "--every", "1", "--checkpoint", folder]
    with started(*line) as process:
        process.stdin.write(content[: len(content) * 3 // 4])
        process.stdin.flush()
        until(lambda: folder.exists() and any(name.endswith("commit") for name in commits(folder)))
        process.send_signal(number)
        _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    match = re.fullmatch(rf"penstock: interrupted after step (\d+); committed to {folder} .*\n", err.decode())
    assert ps.Engine.restore(folder).global_step == int(match[1])
    resumed = replay("--checkpoint", folder, "--resume", source=log)
    assert resumed["state_hash"] == replay()["state_hash"]


def test_a_start_on_a_folder_in_use_ends_before_it_restores_anything(config, tmp_path, replay, refused, monkeypatch):
    replay("--checkpoint", tmp_path / "c")

    def restore(*_, **__):
        raise AssertionError("restored, in vain")

    monkeypatch.setattr(ps.Engine, "restore", restore)
    words = ["--checkpoint", tmp_path / "c", "--resume"]
    with Folder(tmp_path / "c").locked():
        for command in (["replay", config, tmp_path / "log.arrows"], ["serve", config]):
            line = refused(2, *command, *words)
            assert re.search(rf"another run is writing checkpoints there \(process {os.getpid()} on \S+\)", line)
