"""A checkpoint's folder: what is whole, what is damaged, what is kept; and the data files in it."""

import errno
import io
import json
import shutil

import numpy as np
import pytest
from checkpoints import LOG, commits, engine_of
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.base.errors import StateError
from penstock.checkpoint.manifests import digest_of
from penstock.checkpoint.records import MAGIC, Record, read_records
from penstock.checkpoint.store import Folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with commits 1 to 3: a base and two deltas."""
    folder = tmp_path_factory.mktemp("made") / "c"
    engine = engine_of()
    for n in range(3):
        engine.run(iter(LOG[3 * n : 3 * n + 3]))
        engine.save(folder)
    assert commits(folder) == [
        "00000001.base",
        "00000001.commit",
        "00000002.commit",
        "00000002.delta",
        "00000003.commit",
        "00000003.delta",
    ]
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copied")


def refused(folder):
    with pytest.raises(StateError) as caught:
        ps.Engine.restore(folder)
    return str(caught.value)


# ---- whole or not


def test_a_copied_folder_is_a_checkpoint(made, folder):
    assert ps.Engine.restore(folder).state_hash() == ps.Engine.restore(made).state_hash()


@pytest.mark.parametrize("name", ["00000001.base", "00000002.delta", "00000003.delta"])
@pytest.mark.parametrize("damage", ["missing", "cut", "longer", "flipped"])
def test_a_damaged_file_is_named_with_what_to_do(folder, name, damage):
    path = folder / name
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "longer":
        path.write_bytes(data + b"\0")
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    output = refused(folder)
    assert output.startswith(f"{path}: ")
    # What older commits need as well is no reason to go back to them.
    assert {
        "00000001.base": "there is no older commit without it",
        "00000002.delta": "to go back to commit 1, remove 00000002.commit, 00000003.commit",
        "00000003.delta": "to go back to commit 2, remove 00000003.commit",
    }[name] in output
    assert {"missing": "is missing", "cut": "cut", "longer": "mixed up", "flipped": "digest does not fit"}[
        damage
    ] in output


def test_the_commit_that_an_error_advises_is_whole(folder):
    (folder / "00000002.delta").unlink()
    for name in refused(folder).partition(", remove ")[2].split(", "):
        (folder / name).unlink()
    assert ps.Engine.restore(folder).global_step == 1


def test_another_run_s_commit_of_the_same_number_is_no_parent_of_ours(tmp_path):
    ours, others = engine_of(), engine_of(seed=5)
    ours.save(tmp_path / "ours")
    others.save(tmp_path / "others")
    for path in (tmp_path / "others").iterdir():
        shutil.copy(path, tmp_path / "ours")
    ours.run(iter(LOG[:3]))
    ours.save(tmp_path / "ours")
    assert ps.Engine.restore(tmp_path / "ours").state_hash() == ours.state_hash()


def test_a_run_resumes_in_its_folder_after_a_save_elsewhere(tmp_path):
    engine = engine_of()
    engine.run(iter(LOG[:6]), checkpoint=tmp_path / "a")
    engine.save(tmp_path / "b")
    assert engine.run(iter(LOG[:12]), checkpoint=tmp_path / "a", resume=True).skipped == 6
    assert ps.Engine.restore(tmp_path / "a").state_hash() == engine.state_hash()

    restored = ps.Engine.restore(tmp_path / "a")
    for name in ("b", "c"):  # into a folder of the run before, and into a new one
        restored.save(tmp_path / name)
    assert restored.run(iter(LOG[:15]), checkpoint=tmp_path / "a", resume=True).skipped == 12
    assert restored.run(iter(LOG), checkpoint=tmp_path / "c", resume=True).skipped == 15
    assert ps.Engine.restore(tmp_path / "a").global_step == 5
    whole = engine_of()
    whole.run(iter(LOG))
    assert ps.Engine.restore(tmp_path / "c").state_hash() == whole.state_hash()


def test_a_run_does_not_resume_in_its_folder_where_another_engine_has_committed_since(tmp_path):
    engine = engine_of()
    engine.run(iter(LOG[:6]), checkpoint=tmp_path / "a")
    engine.save(tmp_path / "b")
    ps.Engine.restore(tmp_path / "a").run(iter(LOG[:9]), checkpoint=tmp_path / "a", resume=True)
    with pytest.raises(ps.UsageError, match="holds commit 2, which this engine neither wrote nor was restored from"):
        engine.run(iter(LOG[:12]), checkpoint=tmp_path / "a", resume=True)


def test_a_lock_that_cannot_be_had_is_not_another_run(folder, monkeypatch):
    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("penstock.base.filesystem.atomic_files.fcntl.flock", no_locks)
    with pytest.raises(OSError, match="No locks available") as caught:
        Folder(folder).lock()
    assert caught.value.filename == str(folder / ".lock")


def test_swapped_data_files_are_detected(folder):
    two, three = folder / "00000002.delta", folder / "00000003.delta"
    data = two.read_bytes()
    two.write_bytes(three.read_bytes())
    three.write_bytes(data)
    assert str(two) in refused(folder)


def test_a_renamed_manifest_is_refused(folder):
    (folder / "00000002.commit").rename(folder / "00000009.commit")
    assert "00000009.commit: is commit 2 under another name" in refused(folder)


@pytest.mark.parametrize("position", [0, 10, 500, -2])
def test_any_flip_and_any_cut_of_a_manifest_is_seen(folder, position):
    path = folder / "00000003.commit"
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:position] if position else b"")
    assert f"{path}: its digest does not fit" in refused(folder)
    data[position] ^= 1
    path.write_bytes(data)
    assert f"{path}: its digest does not fit" in refused(folder)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    assert "no such checkpoint" in refused(tmp_path / "nothing")
    assert "holds no commit" in refused(tmp_path)
    (tmp_path / "file").write_text("")
    assert "a checkpoint is a folder" in refused(tmp_path / "file")


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (b'"penstock.commit": 6', "format 6; this penstock reads 1"),
        (
            b'"penstock.checkpoint": 5',
            "written by an unreleased earlier version of penstock, which is not read; replay the sources into a new "
            "checkpoint",
        ),
    ],
    ids=["later", "unreleased"],
)
def test_another_format_is_refused(folder, entry, problem):
    path = folder / "00000003.commit"
    text = Folder(folder).newest().encoded().replace(b'"penstock.commit": 1', entry).rpartition(b"\n")[0]
    body = text.rpartition(b"\n")[0]
    path.write_bytes(body + b"\n" + digest_of(body).encode() + b"\n")
    assert problem in refused(folder)


@pytest.mark.parametrize("missing", ["tables", "gate", "positions", "seed"])
def test_a_manifest_that_lacks_something_is_refused_by_name(folder, missing):
    commit = Folder(folder).newest()
    contents = {key: value for key, value in commit.contents.items() if key != missing}
    (folder / "00000003.commit").write_bytes(type(commit)(3, commit.files, contents).encoded())
    assert f"manifest.{missing} is missing" in refused(folder)


@pytest.mark.parametrize(
    ("key", "forged"),
    [("config", "not base64!"), ("config", "AAAA"), ("pipeline", {"num_admitted": "x", "last": None})],
)
def test_contents_that_only_a_restored_engine_reads_are_refused(folder, key, forged):
    commit = Folder(folder).newest()
    (folder / "00000003.commit").write_bytes(type(commit)(3, commit.files, {**commit.contents, key: forged}).encoded())
    assert "its contents do not add up" in refused(folder)


def test_interrupted_commits_are_ignored_and_removed(folder):
    for name in ("00000004.delta", ".00000004.delta.123.part", ".00000004.commit.123.part"):
        (folder / name).write_bytes(b"half")
    engine = ps.Engine.restore(folder)
    assert engine.global_step == 3
    engine.save(folder)
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == [".lock"]
    assert ps.Engine.restore(folder).state_hash() == engine.state_hash()


def test_files_of_others_in_the_folder_stay(folder):
    (folder / "README").write_text("ours")
    for _ in range(4):
        ps.Engine.restore(folder).save(folder)
    assert (folder / "README").read_text() == "ours"


def test_deltas_that_have_outgrown_their_base_become_a_new_one(tmp_path):
    engine = engine_of(num_required=1)
    engine.save(tmp_path)
    for n in range(8):
        engine.apply({"user": (np.arange(400), np.full((400, 4), n, np.float32))})
        engine.save(tmp_path)
    chain = Folder(tmp_path).newest().files
    assert chain[0].name != "00000001.base"
    assert len(commits(tmp_path)) < 12
    assert ps.Engine.restore(tmp_path).state_hash() == engine.state_hash()


# ---- data files

ARRAYS = st.lists(
    st.tuples(st.sampled_from(["<i8", ">i8", "<f4", ">f4", "|u1"]), st.lists(st.integers(0, 4), max_size=3)), max_size=4
)


@given(ARRAYS)
@settings(max_examples=40, deadline=None)
def test_records_of_any_arrays_are_read_back_and_are_little_endian(tmp_path_factory, shapes):
    arrays = {str(n): np.ones(shape, dtype) * (n + 1) for n, (dtype, shape) in enumerate(shapes)}
    path = tmp_path_factory.mktemp("records") / "data"
    records = [Record("rows", {"table": "é"}, arrays), Record("end")]
    path.write_bytes(MAGIC + b"".join(bytes(piece) for record in records for piece in record.pieces()))
    with open(path, "rb") as file:
        first, last = read_records(file, path)
    assert (first.kind, first.header, last) == ("rows", {"table": "é"}, Record("end"))
    assert {name: array.tolist() for name, array in first.arrays.items()} == {n: a.tolist() for n, a in arrays.items()}
    length = int.from_bytes(path.read_bytes()[12:16], "little")
    header = json.loads(path.read_bytes()[16 : 16 + length])
    assert not any(dtype.startswith(">") for _, dtype, _ in header["arrays"])


def test_a_data_file_of_another_kind_is_refused():
    with pytest.raises(StateError, match="data: not a data file of this version"):
        list(read_records(io.BytesIO(b"PAR1" * 10), "data"))
