"""Forged manifests whose digests match: every reader exits with 5 and one line, and opens no file elsewhere."""

import json
import os
import random
import re
import shutil

import pytest
from checkpoints import LOG, config_of, engine_of
from evidence import IS_EVIDENCE, more_as_evidence
from hostile_manifests import BODIES, NAMES, body_of, forged, sealed

import penstock as ps
from penstock.checkpoint.manifests import digest_of
from penstock.checkpoint.records import MAGIC
from penstock.cli import main

COMMANDS = (["inspect", "FOLDER"], ["export", "FOLDER", "OUT"], ["diff", "FOLDER", "FOLDER"], ["replay"])


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A folder with a checkpoint of one commit, and its configuration."""
    root = tmp_path_factory.mktemp("saved")
    config = config_of()
    engine = engine_of(config)
    engine.run(iter(LOG[:6]))
    engine.save(root / "run")
    config.save(root / "config.pbtxt")
    return root


@pytest.fixture
def folder(saved_run, tmp_path):
    shutil.copytree(saved_run, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def errors_of_readers(folder, call):
    """Return the errors of all commands that read a checkpoint, as a set. Assert that ``Engine.restore`` fails."""
    errors = set()
    for command in COMMANDS:
        arguments = [{"FOLDER": folder, "OUT": folder.parent / "out"}.get(argument, argument) for argument in command]
        if command == ["replay"]:
            log = folder.parent / "none.arrows"
            log.touch()
            arguments = ["replay", folder.parent / "config.pbtxt", log, "--checkpoint", folder, "--resume"]
            arguments += ["--num-required", 3]
        output, result = call(5, *arguments)
        assert "Traceback" not in output
        assert len(result["error"]) < 1000
        assert "\n" not in result["error"]
        errors.add(result["error"])
    with pytest.raises(ps.StateError):
        ps.Engine.restore(folder)
    return errors


def forge_manifest(folder, change):
    """Change the fields of the manifest, and write it with the digest that matches."""
    path = folder / "00000001.commit"
    fields = json.loads(body_of(path.read_bytes()))
    change(fields)
    path.write_bytes(sealed(json.dumps(fields).encode()))


@pytest.mark.parametrize("name", [*NAMES, 7, None, True, ["00000001.base"]], ids=ascii)
def test_a_manifest_with_a_file_name_that_penstock_does_not_write_is_refused(folder, name, call):
    os.mkfifo(folder / "pipe")
    (folder.parent / "00000001.base").write_bytes((folder / "00000001.base").read_bytes())
    forge_manifest(folder, lambda fields: fields["files"][0].update(name=name))
    (error,) = errors_of_readers(folder, call)
    assert "add up" in error or "chain" in error or "is missing" in error or "too long" in error
    assert "files[0].name is " in error or not isinstance(name, str) or name.startswith(("0000000", "0" * 99))


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_manifest_without_the_expected_object_is_refused(folder, body, call):
    (folder / "00000001.commit").write_bytes(sealed(body))
    (error,) = errors_of_readers(folder, call)
    assert "00000001.commit: its contents do not add up" in error


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", ["00000001.commit", "00000001.base"])
def test_only_regular_files_are_read(folder, name, kind, call):
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        (folder / name).mkdir()
    if name.endswith("base"):
        forge_manifest(folder, lambda fields: fields["files"][0].update(num_bytes=os.stat(folder / name).st_size))
    (error,) = errors_of_readers(folder, call)
    assert f"{name}: cannot be read" in error


def test_a_link_to_a_file_with_the_right_digest_is_read(folder, call):
    shutil.move(folder / "00000001.base", folder.parent / "elsewhere")
    (folder / "00000001.base").symlink_to(folder.parent / "elsewhere")
    call(0, "inspect", folder)


FORGED_FIELDS = [
    ("global_step", "x"),
    ("global_step", 2**64),
    ("global_step", float("nan")),
    ("seed", True),
    ("tables", {}),
    ("tables[0].name", 7),
    ("tables[0].vocabulary_size", -1),
    ("tables[0].vocabulary_size", 2**62),
    ("tables[0].dim", 10**15),
    ("tables[0].slots", "accumulators"),
    ("tables[0].dynamic", 1),
    ("positions.sources", [3]),
    ("gate", []),
    ("counters", None),
    ("changed_step", "soon"),
    ("learning_rates", 3),
    ("files[0].num_bytes", 1.0),
    ("files[0].digest", "x" * 64),
    ("files[0].parent", 3),
]


@pytest.mark.parametrize(("field_path", "value"), FORGED_FIELDS, ids=ascii)
def test_a_field_of_another_type_or_range_is_refused_by_every_reader(folder, field_path, value, call):
    def replace_field(fields):
        *outer_keys, last_key = field_path.replace("[0]", ".0").split(".")
        for key in outer_keys:
            fields = fields[int(key) if key == "0" else key]
        fields[last_key] = value

    forge_manifest(folder, replace_field)
    errors = errors_for_field(folder, call, field_path)
    assert all(field_path.partition("[")[0].partition(".")[0] in error or "rows" in error for error in errors)


def errors_for_field(folder, call, field_path):
    if field_path in ("tables[0].vocabulary_size", "tables[0].dim"):  # inspect prints any integer
        return {call(5, "export", folder, folder.parent / "out")[1]["error"]}
    return errors_of_readers(folder, call)


@pytest.mark.parametrize("entries", ["files", "tables"])
def test_two_entries_with_the_same_name_are_refused(folder, entries, call):
    forge_manifest(folder, lambda fields: fields[entries].append(fields[entries][0]))
    (error,) = errors_of_readers(folder, call)
    assert f"{entries} has two entries of one name" in error


def renamed(file, name):
    return {**file, "name": name}


INCOMPLETE = {
    "no file": lambda files: [],
    "only a delta": lambda files: [renamed(files[0], "00000001.delta")],
    "all rows and a share": lambda files: [*files, renamed(files[0], "00000001-0of1.0.base")],
    "shares of two jobs": lambda files: [renamed(files[0], f"00000001-0of{count}.0.base") for count in (1, 2)],
}


@pytest.mark.parametrize("files", INCOMPLETE.values(), ids=INCOMPLETE)
def test_files_without_a_base_are_refused_by_every_reader(folder, files, call):
    forge_manifest(folder, lambda fields: fields.update(files=files(fields["files"])))
    errors = errors_of_readers(folder, call)
    assert all("files has no base of all rows, or of each share" in error for error in errors), errors
    with pytest.raises(ps.StateError, match="files has no base"):
        ps.Engine.restore(folder)


def test_a_commit_that_lacks_a_share_restores_no_initial_rows(folder):
    (folder / "00000001.base").rename(folder / "00000001-0of3.0.base")
    forge_manifest(folder, lambda fields: fields.update(files=[renamed(fields["files"][0], "00000001-0of3.0.base")]))
    for share in (None, (1, 3), (0, 2)):
        with pytest.raises(ps.StateError, match=r"commit 1: holds 1 of 3 shares of the rows, without share [12]"):
            ps.Engine.restore(folder, share=share)
    ps.Engine.restore(folder, share=(0, 3))


HEADERS = {
    "a number": b"1",
    "a list": b"[]",
    "an empty object": b"{}",
    "200,000 brackets": b"[" * 200_000,
    "no kind": b'{"arrays": []}',
    "a terabyte": b'{"kind": "rows", "arrays": [["a", "<f4", [250000000000]]]}',
    "objects": b'{"kind": "rows", "arrays": [["a", "O", [1]]]}',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_record_with_an_invalid_header_is_refused(folder, header, call):
    content = MAGIC + len(header).to_bytes(4, "little") + header + bytes(100_000)
    (folder / "00000001.base").write_bytes(content)
    forge_manifest(folder, lambda fields: fields["files"][0].update(num_bytes=len(content), digest=digest_of(content)))
    error = call(5, "export", folder, folder.parent / "out")[1]["error"]
    assert "its records do not add up" in error
    with pytest.raises(ps.StateError):
        ps.Engine.restore(folder)


def test_inspect_shows_sources_that_can_seek(folder, call):
    forge_manifest(folder, lambda fields: fields["positions"]["sources"].append(["kafka://b/t/0", 6, None, [17]]))
    assert {"source": "kafka://b/t/0", "frames": 6} in call(0, "inspect", folder)[1]["sources"]


@pytest.mark.sampled("0", "6", "13", "20", "26", "33")
@more_as_evidence
@pytest.mark.parametrize("seed", range(400 if IS_EVIDENCE else 40))
def test_a_forged_tag_is_one_line_for_every_reader_and_stops_no_run(seed, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    ps.tag("run", "good")
    change, manifest = forged((folder / "good.tag").read_bytes(), random.Random(seed))
    (folder / "good.tag").write_bytes(manifest)
    commands = [["log", "run"], ["inspect", "run@good"], ["export", "run@good", "out"], ["diff", "run", "run@good"]]
    commands += [["branch", "run@good", "new"], ["tag", "run@good", "same"], ["tag", "run", "good", "--step", "1"]]
    commands += [["history", "run", "--table", "user", "--id", "1"], ["tag", "run", "good", "--move"]]
    for command in commands:
        (folder / "good.tag").write_bytes(manifest)
        capsys.readouterr()
        code, error = main(command), capsys.readouterr().err
        assert code in (0, 1, 2, 5), change
        assert "Traceback" not in error, change
        assert code in (0, 1) or re.fullmatch("penstock: [^\n]+\n", error), change
    (folder / "good.tag").write_bytes(manifest)
    engine = ps.Engine.restore("run")
    engine.run(iter(LOG[:9]), checkpoint="run", resume=True)
    assert ps.Engine.restore("run").state_hash() == engine.state_hash()
    assert main(["tag", "run", "--delete", "good"]) == 0
