"""Checkpoints of format 2, whose digests were BLAKE2bp: read, verified, and resumed in format 3.

tests/data/checkpoint_format_2 was written by the code before format 3: a configuration, a log of 24 frames, and the
commits of ``replay --num-required 3 --every 1 --checkpoint commits`` over its first 13.
"""

import dataclasses
import hashlib
import json
import shutil

import pytest
from checkpoints import FORMAT_2, FORMAT_2_WHOLE

import penstock as ps
from penstock.checkpoint.manifests import Blake2bp
from penstock.checkpoint.store import Folder
from penstock.cli import main
from penstock.errors import StateError

LOG = str(FORMAT_2 / "log.arrows")
RESTORED = "f12c5ec39da550d350dfbc5e7074d50be051de78ad1c87f3acf325a28eda1f45"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FORMAT_2 / "commits", tmp_path / "commits")


def versions(folder):
    """Commit → the version of its format, as the manifests state it."""
    stated = {path.stem: path.read_text().rpartition("\n}")[0] + "\n}" for path in folder.glob("*.commit")}
    return {int(number): json.loads(text)["penstock.checkpoint"] for number, text in sorted(stated.items())}


# ---- reading


def test_a_checkpoint_of_format_2_is_restored(folder):
    assert versions(folder) == {1: 2, 2: 2}
    engine = ps.Engine.restore(folder)
    assert (engine.global_step, engine.state_hash()) == (4, RESTORED)


def test_inspect_verifies_a_checkpoint_of_format_2(folder, capsys):
    assert main(["inspect", str(folder)]) == 0
    assert "every digest of the last one fits" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["00000001.base", "00000002.delta", "00000002.commit"])
def test_damage_to_a_checkpoint_of_format_2_is_reported(folder, name):
    path = folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match=f"{name}: its digest does not fit"):
        ps.Engine.restore(folder)


def test_a_manifest_of_one_version_with_the_digest_of_another_is_refused(folder):
    path = folder / "00000002.commit"
    text = path.read_bytes().rstrip(b"\n").rpartition(b"\n")[0]
    path.write_bytes(text + b"\n" + hashlib.blake2b(text, digest_size=32).hexdigest().encode() + b"\n")
    with pytest.raises(StateError, match=r"00000002\.commit: version 2 with the digest of version 3: mixed up"):
        ps.Engine.restore(folder)


def test_a_file_with_the_digest_of_another_version_is_refused(folder):
    commit = Folder(folder).newest()
    digests = [hashlib.blake2b((folder / file.name).read_bytes(), digest_size=32).hexdigest() for file in commit.files]
    files = [
        dataclasses.replace(file, digest=digest, parent=parent)
        for file, digest, parent in zip(commit.files, digests, [None, *digests], strict=False)
    ]
    (folder / "00000002.commit").write_bytes(dataclasses.replace(commit, files=tuple(files)).encoded())
    with pytest.raises(StateError, match=r"00000001\.base: its digest does not fit"):
        ps.Engine.restore(folder)


# ---- resuming


def test_a_resumed_run_commits_in_format_3_and_ends_as_the_whole_run(folder, call):
    replay = ["replay", FORMAT_2 / "tables.pbtxt", LOG, "--num-required", 3]
    _, report = call(0, *replay, "--checkpoint", folder, "--every", 1, "--resume")
    assert (report["skipped"], report["state_hash"]) == (13, FORMAT_2_WHOLE)
    assert versions(folder)[max(versions(folder))] == 3
    assert ps.Engine.restore(folder).state_hash() == FORMAT_2_WHOLE


def test_the_first_commit_after_format_2_is_a_base_and_the_older_ones_stay_readable(folder):
    ps.Engine.restore(folder).save(folder)
    assert versions(folder) == {1: 2, 2: 2, 3: 3}
    assert [file.name for file in Folder(folder).newest().files] == ["00000003.base"]
    (folder / "00000003.commit").unlink()
    assert ps.Engine.restore(folder).state_hash() == RESTORED


def test_the_digest_of_a_commit_is_blake2b(folder):
    ps.Engine.restore(folder).save(folder)
    assert versions(folder) == {1: 2, 2: 2, 3: 3}
    text, last = (folder / "00000003.commit").read_bytes().rstrip(b"\n").rsplit(b"\n", 1)
    assert hashlib.blake2b(text, digest_size=32).hexdigest().encode() == last
    for file in json.loads(text)["files"]:
        assert hashlib.blake2b((folder / file["name"]).read_bytes(), digest_size=32).hexdigest() == file["digest"]


# ---- BLAKE2bp


def bytes_of(size):
    return bytes(n % 251 for n in range(size))


@pytest.mark.parametrize(
    ("size", "digest"),
    [
        # The first 32 of the 64 bytes of the BLAKE2 authors' vectors.
        (0, "b5ef811a8038f70b628fa8b294daae7492b1ebe343a80eaabbf1f6ae664dd67b"),
        (1, "a139280e72757b723e6473d5be59f36e9d50fc5cd7d4585cbc09804895a36c52"),
        # Around blocks and stripes of four; from the implementation that wrote format 2.
        (128, "05ad0f271faf7e361320518452813ff9fb9976ac378050b6eefb05f7867b577b"),
        (512, "61c4dabacdfb1352185aae9dbc04b348af681478b0c4aa7291c7bab11783e8af"),
        (513, "c62cf13185f8eb971737218c9ae187f6447dfd286d206c7d42f442c719527c59"),
        (100_003, "e3b3ebab63b32d188466278605ea6f380f4a63a1eb657996948376d74f014f4c"),
    ],
)
@pytest.mark.parametrize("piece", [100, 512, 200_000])
def test_blake2bp_has_the_known_digests_however_the_bytes_arrive(size, digest, piece):
    found, data = Blake2bp(), memoryview(bytes_of(size))
    for start in range(0, size, piece):
        found.update(data[start : start + piece])
        found.hexdigest()  # reading it changes nothing
    assert found.hexdigest() == digest
