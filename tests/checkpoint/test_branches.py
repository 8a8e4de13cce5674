"""Branches: a new checkpoint that begins with a commit of another one, by links, by copies, whole or not at all."""

import errno
import json
import os
import shutil
from contextlib import suppress
from itertools import count

import pytest
from checkpoints import LOG, engine_of, everything
from evidence import IS_EVIDENCE, more_as_evidence
from faults.operations import Watched, failing
from services import client_of, frame, service_of
from services import config_of as service_config
from versions import HookedStore, Killed, check_tags, files, rewrite, saved

import penstock as ps
from penstock.base.filesystem import atomic_files
from penstock.checkpoint import store
from penstock.checkpoint.arrays import SavedTables
from penstock.checkpoint.store import Folder
from penstock.checkpoint.versions import NamedCommit, branch
from penstock.cli import main
from penstock.model.version import Lineage, Parent

STRIDE = 1 if IS_EVIDENCE else 3


def branched(folder, new, version=None, **more):
    return branch(NamedCommit.of(folder, version), new, **more)


def no_links(number, name, args):
    if name == "link":
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@pytest.fixture(params=["links", "copies"])
def how(request, monkeypatch):
    if request.param == "copies":  # as between two file systems
        monkeypatch.setattr(atomic_files, "operations", Watched(no_links))
    return request.param


def test_a_branch_begins_with_the_commit_and_either_folder_can_be_deleted(folder, how):
    ps.tag(folder, "good", 2)
    expected = ps.Engine.restore(folder, version=2).state_hash()
    for name, version in (("a", 2), ("b", "good")):
        new = folder.parent / name
        branched(folder, new, version)
        shared = (new / "00000001.base").stat().st_ino == (folder / "00000001.base").stat().st_ino
        assert shared == (how == "links")
        assert sorted(files(new)) == ["00000001.base", "00000002.commit", "00000002.delta"]
        assert ps.Engine.restore(new).state_hash() == expected
    shutil.rmtree(folder.parent / "a")
    assert ps.Engine.restore(folder).global_step == 3
    shutil.rmtree(folder)
    assert ps.Engine.restore(folder.parent / "b").state_hash() == expected


def test_training_on_in_a_branch_equals_training_on_from_its_commit(tmp_path, how):
    engine = engine_of()
    engine.run(iter(LOG[:14]), checkpoint=tmp_path / "run")  # with frames in the gate
    ps.tag(tmp_path / "run", "half")
    engine.run(iter(LOG[:30]), checkpoint=tmp_path / "run", resume=True)
    branched(tmp_path / "run", tmp_path / "new", "half")
    continued = ps.Engine.restore(tmp_path / "new")
    assert continued.run(iter(LOG), checkpoint=tmp_path / "new", resume=True, flush=True).skipped == 14
    whole = engine_of()
    whole.run(iter(LOG), flush=True)
    assert everything(continued) == everything(ps.Engine.restore(tmp_path / "new")) == everything(whole)
    assert ps.Engine.restore(tmp_path / "run").global_step == 10


def test_both_continue_without_a_trace_in_each_other(folder):
    branched(folder, folder.parent / "new")
    before = files(folder.parent / "new")
    saved(folder, range(50, 60), engine=ps.Engine.restore(folder))
    assert files(folder.parent / "new") == before
    before = files(folder)
    saved(folder.parent / "new", range(70, 80), engine=ps.Engine.restore(folder.parent / "new"))
    assert files(folder) == before


def test_a_branch_names_its_parent_also_in_later_commits(folder):
    branched(folder, folder.parent / "new", 2)
    parent_digest = Folder(folder).load(2).digests[0]
    saved(folder.parent / "new", range(50, 55), engine=ps.Engine.restore(folder.parent / "new"))
    lineage = Lineage.from_state(Folder(folder.parent / "new").newest().contents["positions"])
    assert lineage.parent == Parent(ps.Version("2"), parent_digest)
    branched(folder.parent / "new", folder.parent / "newer")
    newer = Lineage.from_state(Folder(folder.parent / "newer").newest().contents["positions"])
    assert newer.parent.version.lineage == lineage.id


def test_a_branch_writes_its_deltas_to_a_new_file(tmp_path):
    engine = engine_of()
    deltas = tmp_path / "deltas.arrows"
    engine.run(iter(LOG[:15]), checkpoint=tmp_path / "run", deltas=deltas)
    before = deltas.read_bytes()
    branched(tmp_path / "run", tmp_path / "new")
    other = tmp_path / "other.arrows"
    ps.Engine.restore(tmp_path / "new").run(iter(LOG), checkpoint=tmp_path / "new", resume=True, deltas=other)
    assert deltas.read_bytes() == before
    assert other.exists()


def test_readers_of_one_are_refused_by_a_service_of_the_other(tmp_path, capsys):
    def follow(service):
        return main(["follow", service.address.uri, "--into", f"parquet:{tmp_path / 'store'}", "--once"])

    config = service_config()
    with service_of(ps.Engine(config), tmp_path / "run") as service, client_of(service) as client:
        client.put([frame(number) for number in range(4)], "w0")
        client.checkpoint()
        table = client.table("user")
        assert follow(service) == 0
    branched(tmp_path / "run", tmp_path / "new")
    with service_of(ps.Engine.restore(tmp_path / "new"), tmp_path / "new", resume=True) as service:
        with client_of(service) as client:
            assert client.status().version.lineage != table.version.lineage
            assert client.table("user").version.step == table.version.step
            with pytest.raises(ps.DeltasGoneError, match="this service's state is another one"):
                list(client.deltas(table.version))
        assert follow(service) == 5
    assert "holds the tables of another job or history" in capsys.readouterr().err


# ---- refused


def test_a_branch_needs_a_new_place_and_a_version_that_exists(folder, tmp_path):
    branched(folder, tmp_path / "new")
    with pytest.raises(ps.UsageError, match="new: holds a checkpoint; give a new or empty folder"):
        branched(folder, tmp_path / "new")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ps.UsageError, match="other: holds other files"):
        branched(folder, tmp_path / "other")
    with pytest.raises(ps.UsageError, match="a checkpoint is a folder, this is a file"):
        branched(folder, tmp_path / "other" / "file")
    with pytest.raises(ps.UsageError, match="nothing is written to a version"):
        branched(folder, f"{folder}@2")
    with pytest.raises(ps.StateError, match="no tag 'good'; it has no tags"):
        branched(folder, tmp_path / "newer", "good")
    with pytest.raises(ps.StateError, match="nowhere: no such checkpoint"):
        branched(tmp_path / "nowhere", tmp_path / "newer")
    assert not (tmp_path / "newer").exists()


def test_a_damaged_file_is_not_copied(folder, tmp_path, monkeypatch):
    path = folder / "00000002.delta"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    monkeypatch.setattr(atomic_files, "operations", Watched(no_links))
    with pytest.raises(ps.StateError, match=r"00000002\.delta: its digest does not fit"):
        branched(folder, tmp_path / "new")
    assert left_in(tmp_path / "new") == []
    path.write_bytes(b"")
    with pytest.raises(ps.StateError, match=r"00000002\.delta: 0 bytes"):
        branched(folder, tmp_path / "new")
    assert left_in(tmp_path / "new") == []


# ---- ends of the process, and other processes


def left_in(new):
    return [name for name in os.listdir(new) if name != ".lock"] if new.exists() else []


def test_a_full_disk_leaves_nothing(folder, tmp_path, how, monkeypatch):
    before, new = files(folder), tmp_path / "new"
    for number in count(1):
        operations = failing(number, errno.ENOSPC, also_after=True)
        fails = operations._at

        def hook(n, name, args, fails=fails):
            return fails(n, name, args) or (no_links(n, name, args) if how == "copies" else None)

        monkeypatch.setattr(atomic_files, "operations", Watched(hook))
        with suppress(OSError):
            branched(folder, new)
            break
        assert files(folder) == before
        assert left_in(new) == [], number
    assert number > 5
    assert ps.Engine.restore(new).global_step == 3


@more_as_evidence
def test_a_process_that_is_killed_at_any_file_operation_leaves_a_branch_or_none(folder, tmp_path, how, monkeypatch):
    for number in count(1, STRIDE):
        new = tmp_path / str(number)

        def hook(n, name, args, number=number):
            if n >= number:
                raise Killed
            return no_links(n, name, args) if how == "copies" else None

        operations = Watched(hook)
        with monkeypatch.context() as patch:
            patch.setattr(atomic_files, "operations", operations)
            with suppress(Killed):
                branched(folder, new, 2)
        if not Folder(new).numbers():
            branched(folder, new, 2)  # leftovers do not prevent it
        assert ps.Engine.restore(new).global_step == 2
        saved(new, range(9), engine=ps.Engine.restore(new))
        assert not list(new.glob("*.part"))
        if len(operations.calls) < number:
            break
    assert number > 5


@more_as_evidence
def test_a_branch_at_any_moment_of_cleaning_is_whole_or_none(folder, tmp_path, how, monkeypatch):
    links = no_links if how == "copies" else lambda n, name, args: None
    for number in count(1, STRIDE):
        copy, new = shutil.copytree(folder, tmp_path / f"{number}-run"), tmp_path / str(number)
        engine = ps.Engine.restore(copy)

        def hook(n, name, args, number=number, copy=copy, engine=engine):
            if n == number:
                monkeypatch.setattr(atomic_files, "operations", Watched(links))
                for step in range(5):
                    rewrite(engine)
                    saved(copy, [step], engine=engine)
            return links(n, name, args)

        operations = Watched(hook)
        monkeypatch.setattr(atomic_files, "operations", operations)
        try:
            branched(copy, new, 1)
        except ps.StateError:  # the commit is gone
            assert left_in(new) == []
        else:
            assert SavedTables(new).commit.step == 1
        if len(operations.calls) < number:
            break
    assert number > 5


# ---- stores


def test_a_store_copies_within_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "store_at", HookedStore.at)
    saved(tmp_path / "run", range(3))
    ps.tag(tmp_path / "run", "good", 2)
    expected = ps.Engine.restore(tmp_path / "run", version="good").state_hash()
    read = HookedStore.open

    def manifests_only(self, name, ahead=True):
        assert name.endswith((".commit", ".tag")), f"{name} passed through this machine"
        return read(self, name, ahead)

    monkeypatch.setattr(HookedStore, "open", manifests_only)
    branched(tmp_path / "run", tmp_path / "new", "good")
    monkeypatch.undo()
    assert ps.Engine.restore(tmp_path / "new").state_hash() == expected


def test_a_store_and_a_folder_copy_and_verify_with_progress(folder, tmp_path, monkeypatch):
    expected, store_at = ps.Engine.restore(folder).state_hash(), store.store_at
    monkeypatch.setattr(store, "store_at", lambda place: (HookedStore.at if "store" in str(place) else store_at)(place))
    seen: list[tuple[int, int]] = []
    branched(folder, tmp_path / "store", progress=lambda done, total: seen.append((done, total)))
    branched(tmp_path / "store", tmp_path / "back")
    assert ps.Engine.restore(tmp_path / "store").state_hash() == expected
    assert ps.Engine.restore(tmp_path / "back").state_hash() == expected
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == Folder(folder).newest().num_bytes
    check_tags(tmp_path / "back")


def test_a_branch_of_links_takes_no_room(tmp_path):
    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(50_000, 16, name="user")], ps.SGD(0.1))
    ps.Engine(config).save(tmp_path / "run")
    branched(tmp_path / "run", tmp_path / "new")
    manifest = json.loads((tmp_path / "new" / "00000001.commit").read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[0])
    assert manifest["files"][0]["num_bytes"] > 3_000_000
    links = {path.name: path.stat().st_nlink for path in (tmp_path / "new").iterdir()}
    own = sum(path.stat().st_size for path in (tmp_path / "new").iterdir() if links[path.name] == 1)
    assert (links["00000001.base"], own < 20_000) == (2, True)
