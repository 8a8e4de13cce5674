"""Tags while processes end and others commit: a tag exists or not, and no file that it needs is ever removed."""

import errno
import os
import shutil
from contextlib import suppress
from itertools import count

import pytest
from checkpoints import config_of
from evidence import IS_EVIDENCE, more_as_evidence
from faults.operations import Watched, failing
from versions import HookedStore, Killed, check_tags, files, removed_after, rewrite, saved

import penstock as ps
from penstock.base.filesystem import atomic_files
from penstock.base.filesystem.file_stores import LocalStore
from penstock.checkpoint import store
from penstock.checkpoint.store import ABANDONED_S, Folder

STRIDE = 1 if IS_EVIDENCE else 3


@pytest.mark.parametrize("move", [False, True])
def test_a_full_disk_leaves_the_folder_as_it_was(move, folder, monkeypatch):
    ps.tag(folder, "good", 1)
    before = files(folder)
    for number in count(1):
        operations = failing(number, errno.ENOSPC, also_after=True)
        monkeypatch.setattr(atomic_files, "operations", operations)
        with suppress(OSError):
            ps.tag(folder, "good" if move else "other", 2, move=move)
            break
        if operations.calls[number - 1] == "sync_folder":  # which needs no room: then the name is there already
            break
        assert files(folder) == before, number
    assert number > 3


@more_as_evidence
def test_a_process_that_is_killed_at_any_file_operation_leaves_a_tag_or_none(folder, tmp_path, monkeypatch):
    ps.tag(folder, "moved", 1)
    for number in count(1, STRIDE):
        copy = shutil.copytree(folder, tmp_path / str(number))
        operations = Watched(lambda n, *_, number=number: kill(n >= number))
        for words in (("new", 2, False), ("moved", 2, True)):
            with monkeypatch.context() as patch:
                operations.calls.clear()
                patch.setattr(atomic_files, "operations", operations)
                with suppress(Killed):
                    ps.tag(copy, words[0], words[1], move=words[2])
            steps = {name: step for name, (step, _) in check_tags(copy).items()}
            assert steps["moved"] in ((1,) if words[0] == "new" else (1, 2))
            assert steps.get("new", 2) == 2
        removed_after(copy)
        check_tags(copy)
        ps.tag(copy, "moved", move=True)  # a leftover does not prevent it
        if len(operations.calls) < number:
            break
    assert number > 4


def kill(now):
    if now:
        raise Killed


def test_a_tag_that_a_killed_process_left_pins_its_files_for_a_day(folder, monkeypatch):
    def killed(number, name, args):
        kill(name == "link")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "operations", Watched(killed))
        patch.setattr(atomic_files, "discard", lambda path: None)
        with suppress(Killed):
            ps.tag(folder, "good", 1)
    (left,) = folder.glob(".good.*.tagging")
    removed_after(folder)
    assert (Folder(folder).tag_names(), left.exists()) == ([], True)
    seconds = left.stat().st_mtime - ABANDONED_S - 1
    os.utime(left, (seconds, seconds))
    removed_after(folder, 1)
    assert not left.exists()


class Meeting:
    """A tag of the oldest commit, and one more, which removes it and its files: a tag that succeeded is whole."""

    def __init__(self, folder):
        self.folder, self._engine = folder, ps.Engine.restore(folder)
        self.tagged = None
        while not self._is_alone(*map(Folder(folder).load, Folder(folder).numbers())):
            self.commits()

    def _is_alone(self, oldest, *newer):
        """Whether no newer commit needs a file of the oldest one."""
        self._step = oldest.step
        return not {file.name for file in oldest.files} & {file.name for commit in newer for file in commit.files}

    def tag(self):
        try:
            ps.tag(self.folder, "oldest", self._step)
            self.tagged = True
        except ps.StateError:  # its commit is gone
            self.tagged = False

    def commits(self):
        rewrite(self._engine)
        saved(self.folder, [5], engine=self._engine)

    def order(self, first):
        """What begins, and what comes in between."""
        return (self.tag, self.commits) if first == "tag" else (self.commits, self.tag)

    def check(self):
        assert set(check_tags(self.folder)) == ({"oldest"} if self.tagged else set())
        assert ps.Engine.restore(self.folder).global_step >= 3


@more_as_evidence
@pytest.mark.parametrize("has_locks", [True, False])
@pytest.mark.parametrize("first", ["tag", "commits"])
def test_a_tag_and_commits_at_any_moment_of_each_other_lose_no_file(first, has_locks, tmp_path, monkeypatch):
    def before_operations(hook):
        watched = Watched(lambda n, *_: hook(n)) if hook else atomic_files.Operations()
        monkeypatch.setattr(atomic_files, "operations", watched)

    if not has_locks:
        monkeypatch.setattr(store, "store_at", HookedStore.at)
    set_hook = before_operations if has_locks else HookedStore.hooked
    saved(tmp_path / "run", range(3))
    for number in count(1, STRIDE):
        meeting = Meeting(shutil.copytree(tmp_path / "run", tmp_path / str(number)))
        begins, comes_between = meeting.order(first)
        met = []

        def hook(n, number=number, comes_between=comes_between, met=met):
            if n == number:
                set_hook(None)
                met.append(n)
                comes_between()

        set_hook(hook)
        begins()
        set_hook(None)
        meeting.check()
        if not met:
            break
    assert number > 4


@more_as_evidence
def test_a_store_without_locks_killed_at_any_request_leaves_a_tag_or_none(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "store_at", HookedStore.at)
    saved(tmp_path / "run", range(3))
    for number in count(1, STRIDE):
        copy = shutil.copytree(tmp_path / "run", tmp_path / str(number))
        HookedStore.hooked(lambda n, number=number: kill(n >= number))
        with suppress(Killed):
            ps.tag(copy, "good", 1)
        num_calls = HookedStore.hooked(None)
        check_tags(copy)
        removed_after(copy)
        check_tags(copy)
        if num_calls < number:
            break
    assert number > 4


def test_a_listing_that_misses_both_names_of_a_tag_removes_none_of_its_files(folder, monkeypatch):
    """A large folder is listed in pieces: the tag may get its name when that piece is over, and its other one not."""
    ps.tag(folder, "good", 1)
    engine = ps.Engine.restore(folder)
    for number in range(5):  # until the tag alone needs its files
        rewrite(engine)
        saved(folder, [number], engine=engine)
    names, missed = LocalStore.names, []

    def listed(self):
        missing = "good.tag" if len(missed) < 2 else None
        missed.append(missing)
        return [name for name in names(self) if name != missing]

    monkeypatch.setattr(store, "LISTED_AT_ONCE", 0)
    locked = Folder(folder)
    locked.lock()
    monkeypatch.setattr(LocalStore, "names", listed)
    locked.tidy(1)
    monkeypatch.undo()
    locked.unlock()
    assert list(check_tags(folder)) == ["good"]


def test_tables_of_a_new_configuration_are_checked_against_the_version(folder):
    ps.tag(folder, "good", 1)
    with pytest.raises(ps.StateError, match=r"run, commit 1: table 'user' has dim 2 in the checkpoint and 4"):
        ps.Engine.restore(f"{folder}@good", config=config_of())
