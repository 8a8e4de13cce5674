"""Tags: a name keeps a commit, whatever a run removes, and ``DIR@VERSION`` is read wherever a checkpoint is."""

import errno
import os
import shutil

import pytest
from checkpoints import LOG, config_of, engine_of, everything, unbroken
from faults.operations import Watched
from ipc import write
from limits import until
from services import client_of, frame, service_of
from services import config_of as service_config
from sharing import LocalJob
from versions import CONFIG, check_tags, files, removed_after, rewrite, saved, step

import penstock as ps
from penstock.base.filesystem import atomic_files
from penstock.checkpoint import versions
from penstock.checkpoint.arrays import SavedTables
from penstock.checkpoint.store import Folder

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
                until(lambda: Folder(tmp_path / "run").numbers())  # its first commit may be in flight
                ps.tag(tmp_path / "run", f"at-{number}")
            yield batch

    engine.run(frames(), checkpoint=tmp_path / "run", every=1, flush=True)
    assert engine.state_hash() == unbroken()
    assert len(check_tags(tmp_path / "run")) == 2


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


@pytest.mark.parametrize("version", [True, 1.5, b"good"])
def test_a_version_is_a_tag_or_a_step(folder, version):
    with pytest.raises(ps.UsageError, match="version: expected a tag or a step"):
        ps.Engine.restore(folder, version=version)


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "x.commit", "a" * 64, "tag", "a.tag"])
def test_any_other_name_is_one(folder, name):
    ps.tag(folder, name)
    assert SavedTables(f"{folder}@{name}").commit.number == 3


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
