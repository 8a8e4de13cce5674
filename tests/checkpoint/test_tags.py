"""Tags: a name keeps a commit, whatever a run removes, and ``DIR@VERSION`` is read wherever a checkpoint is."""

import errno
import os
import shutil
from contextlib import suppress
from itertools import count

import pytest
from checkpoints import LOG, config_of, engine_of, everything, unbroken
from evidence import IS_EVIDENCE
from faults.operations import Watched, failing
from ipc import write
from services import client_of, frame, service_of
from services import config_of as service_config
from sharing import LocalJob
from versions import CONFIG, HookedStore, Killed, check_tags, files, rewrite, saved, step

import penstock as ps
from penstock.checkpoint import store, versions
from penstock.checkpoint.arrays import SavedTables
from penstock.checkpoint.store import ABANDONED_S, Folder
from penstock.filesystem import atomic_files
from penstock.filesystem.file_stores import LocalStore

STRIDE = 1 if IS_EVIDENCE else 3


@pytest.fixture
def folder(tmp_path):
    """Commits of steps 1 to 3, which are all that it keeps."""
    saved(tmp_path / "run", range(3))
    return tmp_path / "run"


def removed_after(folder, num_commits=4):
    """Commit until a run has removed everything that it may."""
    saved(folder, range(100, 100 + num_commits), engine=ps.Engine.restore(folder))


# ---- what a tag keeps, and what it names


def test_a_tagged_commit_outlives_the_commits_that_a_run_keeps(folder):
    hashes = {name: ps.Engine.restore(folder, version=name).state_hash() for name in (1, 2)}
    ps.tag(folder, "first", 1)
    ps.tag(folder, "second", 2, note="a  note")
    removed_after(folder)
    assert len(Folder(folder).numbers()) == 3
    assert ps.Engine.restore(f"{folder}@first").state_hash() == hashes[1]
    assert ps.Engine.restore(folder, version="second").state_hash() == hashes[2]
    assert ps.Engine.restore(f"{folder}@1").global_step == 1  # a step that only a tag keeps
    assert Folder(folder).tag("second").note == "a note"


def test_files_that_only_a_deleted_tag_needed_are_removed(folder):
    ps.tag(folder, "old")
    base = Folder(folder).tag("old").commit.files[0].name
    engine = ps.Engine.restore(folder)
    for number in range(8):
        rewrite(engine)
        step(engine, number)
        engine.save(folder)
    assert base not in {file.name for file in Folder(folder).newest().files}
    assert (folder / base).exists()
    versions.delete_tag(Folder(folder), "old")
    assert not (folder / base).exists()
    assert ps.Engine.restore(folder).global_step == engine.global_step


def test_files_of_a_tag_that_is_deleted_during_a_run_are_removed_by_its_next_commit(tmp_path):
    folder = tmp_path / "run"
    engine, _ = saved(folder, range(1))
    ps.tag(folder, "old")
    for number in range(5):
        rewrite(engine)
        saved(folder, [number], engine=engine)
    running = Folder(folder)
    running.lock()
    versions.delete_tag(Folder(folder), "old")
    assert (folder / "00000001.base").exists()
    running.unlock()
    saved(folder, [9], engine=engine)
    assert not (folder / "00000001.base").exists()


def test_a_tag_is_of_the_newest_commit_and_an_engine_tags_its_last_one(folder):
    engine = ps.Engine.restore(folder)
    step(engine, 5)  # in no commit
    engine.tag("now")
    ps.tag(folder, "newest")
    assert ps.Engine.restore(f"{folder}@now").global_step == ps.Engine.restore(f"{folder}@newest").global_step == 3


def test_an_engine_without_a_commit_has_nothing_to_tag(tmp_path):
    with pytest.raises(ps.StateError, match="this engine has no commit yet; save it, or run it with checkpoint="):
        ps.Engine(CONFIG).tag("good")
    share = ps.Engine(CONFIG, share=(0, 2))
    with pytest.raises(ps.StateError, match="holds a share of the rows"):
        share.tag("good")


def test_a_run_is_tagged_while_it_commits(tmp_path):
    engine = engine_of()

    def frames():
        for number, batch in enumerate(LOG):
            if number in (12, 24):
                engine.save(tmp_path / "elsewhere")  # waits for no commit of the run
                with suppress(ps.StateError):  # its first commit may be in flight
                    ps.tag(tmp_path / "run", f"at-{number}")
            yield batch

    engine.run(frames(), checkpoint=tmp_path / "run", every=1, flush=True)
    assert engine.state_hash() == unbroken()
    assert check_tags(tmp_path / "run")


def test_training_on_from_a_tag_equals_training_on_from_its_commit(tmp_path):
    engine = engine_of()
    engine.run(iter(LOG[:15]), checkpoint=tmp_path / "run")
    ps.tag(tmp_path / "run", "half")
    engine.run(iter(LOG[:30]), checkpoint=tmp_path / "run", resume=True)
    travelled = ps.Engine.restore(f"{tmp_path / 'run'}@half")
    assert travelled.run(iter(LOG), checkpoint=tmp_path / "new", resume=True, flush=True).skipped == 15
    whole = engine_of()
    whole.run(iter(LOG), flush=True)
    assert everything(travelled) == everything(whole)
    with pytest.raises(ps.UsageError, match="holds commit 2, which this engine neither wrote nor was restored from"):
        ps.Engine.restore(f"{tmp_path / 'run'}@half").run(iter(LOG), checkpoint=tmp_path / "run", resume=True)


def test_commits_after_going_back_leave_the_files_of_tags_alone(folder):
    """A removed manifest frees its number, but not the name of a data file that a tag needs."""
    digests = Folder(folder).newest().digests
    ps.tag(folder, "future")
    for number in (3, 2):
        (folder / f"{number:08}.commit").unlink()
    saved(folder, range(50, 53), engine=ps.Engine.restore(folder))
    assert check_tags(folder)["future"] == (3, digests)


def test_a_service_is_tagged_while_it_serves_also_the_commit_of_its_start(tmp_path):
    folder = tmp_path / "run"
    for start in range(3):
        engine = ps.Engine.restore(folder) if start else ps.Engine(service_config())
        with service_of(engine, folder, resume=bool(start)) as service, client_of(service) as client:
            service.engine.tag(f"start-{start}")  # from the second start on, a commit that repeats the one before
            for number in range(2):
                client.put([frame(2 * start + number)], "w0")
                client.checkpoint()
            ps.tag(folder, f"served-{start}")
            service.engine.tag("newest", move=True)
    removed = ps.Engine.restore(folder)
    for _ in range(4):
        rewrite(removed)
        removed.apply({"user": ([1], [[1.0] * 4])})
        removed.save(folder)
    steps = {name: step for name, (step, _) in check_tags(folder).items()}
    assert steps == {"start-0": 0, "start-1": 2, "start-2": 4, "served-0": 2, "served-1": 4, "served-2": 6, "newest": 6}
    lineages = {Folder(folder).tag(name).commit.contents["positions"]["lineage"] for name in steps}
    assert len(lineages) == 1


def test_a_commit_of_shares_is_tagged_and_restored_by_any_number_of_shares(tmp_path):
    log = write(tmp_path / "log.arrows", LOG)
    job = LocalJob(config_of(), 2)
    job.run([log], limit=15)
    job.commit(tmp_path / "run")
    ps.tag(tmp_path / "run", "half")
    expected = ps.Engine.restore(tmp_path / "run").state_hash()
    job.run([log])  # without the frames that are stale by now
    for _ in range(5):
        job.commit(tmp_path / "run")
    assert ps.Engine.restore(f"{tmp_path / 'run'}@half").state_hash() == expected
    third = ps.Engine.restore(tmp_path / "run", share=(1, 3), version="half")
    assert third.global_step == 5
    assert check_tags(tmp_path / "run")


# ---- names


@pytest.mark.parametrize("name", ["", "1", "12a", "a@b", "a/b", "a b", "é", "a" * 65, "-a", ".a", "a\n", None, 3])
def test_invalid_names_are_refused(folder, name):
    before = files(folder)
    with pytest.raises(ps.UsageError, match="expected a"):
        ps.tag(folder, name)
    assert files(folder) == before


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "x.commit", "a" * 64, "tag", "a.tag"])
def test_any_other_name_is_one(folder, name):
    ps.tag(folder, name)
    assert SavedTables(f"{folder}@{name}").commit.number == 3


def test_a_second_tag_of_a_name_is_refused_unless_it_moves(folder):
    ps.tag(folder, "good", 1)
    with pytest.raises(ps.UsageError, match=r"tag 'good' names step 1 already; give --move \(move=True\)"):
        ps.tag(folder, "good", 2)
    assert ps.Engine.restore(folder, version="good").global_step == 1
    ps.tag(folder, "good", 2, move=True)
    assert ps.Engine.restore(folder, version="good").global_step == 2


def test_of_two_processes_that_create_a_tag_of_one_name_one_is_refused(folder, monkeypatch):
    def other(number, name, args):
        if name == "link":
            monkeypatch.setattr(atomic_files, "operations", atomic_files.Operations())
            ps.tag(folder, "good", 1)

    monkeypatch.setattr(atomic_files, "operations", Watched(other))
    with pytest.raises(ps.UsageError, match="tag 'good' names step 1 already"):
        ps.tag(folder, "good", 2)
    assert ps.Engine.restore(folder, version="good").global_step == 1
    assert not list(folder.glob(".good*"))


def test_a_file_system_without_links_has_tags(folder, monkeypatch):
    def no_links(number, name, args):
        if name == "link":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(atomic_files, "operations", Watched(no_links))
    ps.tag(folder, "good", 1)
    with pytest.raises(ps.UsageError, match="tag 'good' names step 1 already"):
        ps.tag(folder, "good", 2)
    ps.tag(folder, "good", 2, move=True)
    assert {name: step for name, (step, _) in check_tags(folder).items()} == {"good": 2}


def test_a_version_that_does_not_exist_names_the_nearest(folder):
    ps.tag(folder, "good", 1)
    (folder / "00000002.commit").unlink()
    for version, text in {
        "godo": "no tag 'godo'; did you mean 'good'?",
        "x": "no tag 'x'; there are: good",
        2: r"no commit of step 2; the nearest: 1 \(commit 1\) and 3 \(commit 3\)",
        9: r"no commit of step 9; the nearest: 3 \(commit 3\)",
    }.items():
        for restore in (
            lambda version=version: ps.Engine.restore(folder, version=version),
            lambda version=version: SavedTables(f"{folder}@{version}"),
        ):
            with pytest.raises(ps.StateError, match=text):
                restore()
    with pytest.raises(ps.StateError, match="no tag 'x'; there are: good"):
        versions.delete_tag(Folder(folder), "x")
    with pytest.raises(ps.StateError, match=r"nowhere: no such checkpoint"):
        ps.Engine.restore(folder.parent / "nowhere@good")
    for version in (True, 1.5, b"good"):
        with pytest.raises(ps.UsageError, match="version: expected a tag or a step"):
            ps.Engine.restore(folder, version=version)


def test_a_folder_of_the_literal_name_wins(folder):
    ps.tag(folder, "good", 1)
    saved(folder.parent / "other", range(9), every=9)
    literal = (folder.parent / "other").rename(folder.parent / "run@good")
    assert ps.Engine.restore(literal).global_step == 9
    shutil.rmtree(literal)
    assert ps.Engine.restore(literal).global_step == 1


def test_a_folder_with_an_at_can_be_written_and_a_version_cannot(folder):
    saved(folder.parent / "a@b", range(1))
    ps.tag(folder.parent / "a@b", "good")
    assert ps.Engine.restore(folder.parent / "a@b@good").global_step == 1
    with pytest.raises(ps.UsageError, match=r"version 2 of a checkpoint, .* penstock branch .*run NEWDIR --at 2"):
        ps.Engine(CONFIG).save(folder.parent / "run@2")
    with pytest.raises(ps.UsageError, match="nothing is written to a version"):
        engine_of().run(iter(LOG), checkpoint=folder.parent / "run@2")
    ps.Engine(CONFIG).save(folder.parent / "run@no-version-of-it")


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("run@good", ("run", "good")),
        ("a@b/run@12", ("a@b/run", "12")),
        ("a/run@good/", ("a/run", "good")),
        ("run@a@b", ("run@a", "b")),
        ("a@good/run", None),
        ("@good", None),
        ("run@", None),
        ("run@-x", None),
        ("abfs://container@account", None),
        ("abfs://container@account/run", None),
        ("abfs://container@account/run@good", ("abfs://container@account/run", "good")),
        ("s3://key:secret@bucket/run@3?region=x@y", ("s3://key:secret@bucket/run?region=x@y", "3")),
        ("file:///a/run@good", ("file:///a/run", "good")),
    ],
)
def test_a_version_is_named_in_the_last_component_of_a_path(place, named):
    assert versions.split(place) == named


# ---- damage


def test_a_damaged_tag_is_named_and_nothing_is_cleaned(folder):
    ps.tag(folder, "good", 1)
    path = folder / "good.tag"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ps.StateError, match=r"good\.tag: its digest does not fit.*; copy it anew, or delete the tag"):
        ps.Engine.restore(f"{folder}@good")
    before = {name for name in files(folder) if not name.endswith(".commit")}
    removed_after(folder)
    assert before <= set(files(folder))
    ps.tag(folder, "good", move=True)
    removed_after(folder)
    assert check_tags(folder)
    assert not (folder / "00000001.commit").exists()


def test_a_missing_file_of_a_tag_is_named(folder):
    ps.tag(folder, "good", 2)
    removed_after(folder)
    (folder / "00000002.delta").unlink()
    with pytest.raises(ps.StateError, match=r"00000002\.delta: is missing; copy it anew, or delete the tag"):
        ps.Engine.restore(f"{folder}@good")


def test_a_commit_whose_files_are_not_all_there_gets_no_tag(folder):
    (folder / "00000002.delta").write_bytes(b"")
    with pytest.raises(ps.StateError, match=r"00000002\.delta: 0 bytes"):
        ps.tag(folder, "good", 2)
    assert Folder(folder).tag_names() == []


def test_commits_of_a_folder_with_tags_say_so_to_a_penstock_that_would_remove_what_tags_pin(folder):
    version = b'"penstock.checkpoint": 4'
    assert version not in (folder / "00000003.commit").read_bytes()
    ps.tag(folder, "good", 1)
    assert version in (folder / "00000003.commit").read_bytes()
    removed_after(folder, 1)
    assert version in (folder / "00000004.commit").read_bytes()
    versions.delete_tag(Folder(folder), "good")
    removed_after(folder, 1)
    assert version not in (folder / "00000005.commit").read_bytes()


# ---- ends of the process, and other processes


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


@pytest.mark.parametrize("first", ["tag", "commits"])
def test_a_tag_and_commits_at_any_moment_of_each_other_lose_no_file(first, folder, tmp_path, monkeypatch):
    for number in count(1, STRIDE):
        meeting = Meeting(shutil.copytree(folder, tmp_path / str(number)))
        begins, comes_between = meeting.order(first)

        def hook(n, *_, number=number, comes_between=comes_between):
            if n == number:
                monkeypatch.setattr(atomic_files, "operations", atomic_files.Operations())
                comes_between()

        operations = Watched(hook)
        monkeypatch.setattr(atomic_files, "operations", operations)
        begins()
        monkeypatch.setattr(atomic_files, "operations", atomic_files.Operations())
        meeting.check()
        if len(operations.calls) < number:
            break
    assert number > 4


@pytest.mark.parametrize("first", ["tag", "commits"])
def test_a_store_without_locks_loses_no_file_either(first, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "store_at", HookedStore.at)
    saved(tmp_path / "run", range(3))
    for number in count(1, STRIDE):
        meeting = Meeting(shutil.copytree(tmp_path / "run", tmp_path / str(number)))
        begins, comes_between = meeting.order(first)

        def hook(n, number=number, comes_between=comes_between):
            if n == number:
                HookedStore.hooked(None)
                comes_between()

        HookedStore.hooked(hook)
        begins()
        num_calls = HookedStore.hooked(None)
        meeting.check()
        if num_calls < number:
            break
    assert number > 4


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


def test_a_run_that_uses_no_tags_performs_the_file_operations_of_before(tmp_path, monkeypatch):
    """A commit lists the folder as often as it did, and reads and writes no other file."""
    engine, _ = saved(tmp_path / "run", range(4))
    operations, listings, names = Watched(), [], LocalStore.names
    monkeypatch.setattr(atomic_files, "operations", operations)
    monkeypatch.setattr(LocalStore, "names", lambda self: listings.append(self) or names(self))
    step(engine, 9)
    engine.save(tmp_path / "run")
    listings_of_a_save, reads, read = len(listings), [], LocalStore.read
    monkeypatch.setattr(LocalStore, "read", lambda self, name: reads.append(name) or read(self, name))
    Folder(tmp_path / "run").tidy(3)
    assert (listings_of_a_save, len(listings) - listings_of_a_save, len(reads)) == (6, 2, 3)
    expected = ["open_lock", "create", "write", "sync", "rename", "sync_folder"]
    expected += ["create", "write", "sync", "rename", "sync_folder", "remove"]
    assert operations.calls == expected
    assert b'"penstock.checkpoint": 3' in (tmp_path / "run" / "00000005.commit").read_bytes()


def test_tables_of_a_new_configuration_are_checked_against_the_version(folder):
    ps.tag(folder, "good", 1)
    with pytest.raises(ps.StateError, match=r"run, commit 1: table 'user' has dim 2 in the checkpoint and 4"):
        ps.Engine.restore(f"{folder}@good", config=config_of())
