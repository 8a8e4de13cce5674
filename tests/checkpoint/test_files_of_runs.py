"""Deltas and bad rows in files next to a checkpoint: a file has its name only when a commit counts it.

So whatever ends a run, at whatever moment, the same command with --resume ends with the files of an unbroken run.
"""

import errno
import os
from contextlib import suppress
from itertools import count

import pytest
from checkpoints import config_of, engine_of, log_of
from cli import outcome
from faults.harness import batches_in, with_bad_row
from faults.operations import Watched, failing, short_write
from ipc import write
from versions import Killed

import penstock as ps
from penstock.base.filesystem import atomic_files
from penstock.checkpoint.store import Folder

CONFIG = config_of()
STEPS = 6


@pytest.fixture
def replay(config, tmp_path, capsys):
    """A command whose every frame has a bad row; gives the exit code and the error."""
    log = write(tmp_path / "log.arrows", [with_bad_row(batch) for batch in log_of(range(STEPS))])

    def run(*flags, folder=tmp_path / "saved"):
        words = ["replay", config, log, "--num-required", 3, "--every", 2, "--checkpoint", folder]
        code, report, _ = outcome(capsys, *words, *flags)
        return code, report.get("error", "")

    return run


# kind → the file's name
KINDS = {"deltas": "d.arrows", "quarantine": "bad.arrows", "quarantine in Arrow's file format": "bad.arrow"}


def flags_of(kind, file):
    if kind == "deltas":
        return ["--deltas", file, "--on-bad-row", "drop"]
    return ["--on-bad-row", f"quarantine={file}"]


@pytest.fixture
def unbroken(kind, replay, tmp_path):
    """The contents of the file of an unbroken run."""
    file = tmp_path / "unbroken" / KINDS[kind]
    assert replay(*flags_of(kind, file), folder=tmp_path / "unbroken" / "saved") == (0, "")
    return batches_in(file)


def no_commits(number, name, args):
    """No manifest gets its name."""
    if name == "rename" and str(args[1]).endswith(".commit"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [[], ["--resume"]], ids=["begun", "begun with --resume"])
def test_a_run_that_fails_before_its_first_commit_is_repeated(kind, first, replay, unbroken, tmp_path, monkeypatch):
    file = tmp_path / KINDS[kind]
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "operations", Watched(no_commits))
        assert replay(*flags_of(kind, file), *first)[0] == 6
    assert not file.exists()
    assert replay(*flags_of(kind, file), "--resume") == (0, "")
    assert batches_in(file) == unbroken


def killed(number):
    def at(n, name, args):
        if n >= number:
            raise Killed

    return Watched(at)


ENDS = {
    "killed": killed,
    "an error": lambda number: failing(number, errno.EIO),
    "no space": lambda number: failing(number, errno.ENOSPC, also_after=True),
    "half a write": short_write,
}


@pytest.mark.sampled("killed-deltas")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ENDS)
def test_a_run_ended_at_any_file_operation_resumes_to_the_same_file(kind, end, replay, unbroken, tmp_path, monkeypatch):
    for number in count(1, 5):
        folder, file = tmp_path / f"saved-{number}", tmp_path / str(number) / KINDS[kind]
        flags, first = flags_of(kind, file), ["--resume"] * (number % 2)
        operations = ENDS[end](number)
        with monkeypatch.context() as patch:
            patch.setattr(atomic_files, "operations", operations)
            with suppress(Killed):
                replay(*flags, *first, folder=folder)
        assert not file.exists() or Folder(folder).numbers(), f"operation {number}: FILE before a commit"
        assert replay(*flags, "--resume", folder=folder) == (0, ""), f"operation {number}"
        assert batches_in(file) == unbroken, f"operation {number}"
        if len(operations.calls) < number:
            break
    assert number > 15  # at least the first commit and the last: one that falls due during another waits for it


def test_a_refused_run_leaves_no_file(replay, tmp_path):
    assert replay("--on-bad-row", "drop")[0] == 0
    for arguments in ({"deltas": tmp_path / "file"}, {"on_bad_row": f"quarantine={tmp_path / 'file'}"}):
        with pytest.raises(ps.UsageError, match="holds a checkpoint; resume it"):
            engine_of().run(log_of([0]), checkpoint=tmp_path / "saved", **arguments)
    assert list(tmp_path.glob("*file*")) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_begins_at_the_end_of_a_log_is_there_and_can_be_given_again(kind, replay, tmp_path):
    assert replay("--on-bad-row", "drop")[0] == 0
    file = tmp_path / KINDS[kind]
    for _ in range(3):
        code, error = replay(*flags_of(kind, file), "--resume")
        assert (code, error) == (0, "")
        assert batches_in(file) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_process_that_is_refused_leaves_the_first_ones_file_alone(kind, replay, tmp_path):
    file, folder = tmp_path / KINDS[kind], tmp_path / "saved"
    assert replay(*flags_of(kind, file), "--limit", "9") == (0, "")
    part = file.rename(tmp_path / f".{file.name}.part")  # the partial file of a run that continues it
    before = part.read_bytes()
    running = Folder(folder)
    running.lock()
    try:
        code, error = replay(*flags_of(kind, file), "--resume")
    finally:
        running.unlock()
    assert code == 2
    assert "another run is writing checkpoints there" in error
    assert (file.exists(), part.read_bytes()) == (False, before)


def test_deltas_under_a_new_name_that_no_commit_counts_begin_again(replay, tmp_path, monkeypatch):
    assert replay(*flags_of("deltas", tmp_path / "old"), "--limit", "9") == (0, "")
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "operations", Watched(no_commits))
        assert replay(*flags_of("deltas", tmp_path / "new"), "--resume")[0] == 6
    assert not (tmp_path / "new").exists()
    assert replay(*flags_of("deltas", tmp_path / "new"), "--resume") == (0, "")
    assert replay(*flags_of("deltas", tmp_path / "whole"), folder=tmp_path / "another") == (0, "")
    both = [*batches_in(tmp_path / "old"), *batches_in(tmp_path / "new")]
    assert both == batches_in(tmp_path / "whole")
