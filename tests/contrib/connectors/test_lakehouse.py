"""Replays of tables with versions: rows in the order in which they were appended, each once."""

import signal

import numpy as np
import pyarrow as pa
import pytest
from cli import outcome, started
from lakehouse import FRAMES, KINDS, VERSIONS, Delta, Iceberg, Lance, new_table
from limits import HANG_S, until
from services import config_of, replayed

import penstock as ps
from penstock.base.errors import InputError, StateError
from penstock.checkpoint.store import Folder


@pytest.fixture(params=KINDS)
def table(request, tmp_path, monkeypatch):
    return new_table(request.param, tmp_path, monkeypatch)


@pytest.fixture(params=[Delta, Lance])  # pyiceberg compacts no tables
def compactable(request, tmp_path):
    return request.param(tmp_path)


def test_versions_in_order_are_the_order_of_frames(table):
    for numbers in VERSIONS:
        table.append(numbers)
    engine = ps.Engine(config_of())
    report = engine.run(table.spelling)
    assert (report.frames, report.stale) == (12, 0)
    assert engine.state_hash() == replayed(FRAMES[:12]).state_hash()


def test_a_replay_continues_after_any_frame(table, tmp_path):
    for numbers in VERSIONS[:4]:
        table.append(numbers)
    for stop in (1, 3, 4, 6, 10):
        folder = tmp_path / f"{stop}"
        ps.Engine(config_of()).run(table.spelling, limit=stop, checkpoint=folder)
    table.append(VERSIONS[4])
    for stop in (1, 3, 4, 6, 10):
        engine = ps.Engine.restore(tmp_path / f"{stop}")
        report = engine.run(table.spelling, checkpoint=tmp_path / f"{stop}", resume=True)
        assert (report.skipped, report.frames) == (stop, 12 - stop)
        assert engine.state_hash() == replayed(FRAMES[:12]).state_hash()


def test_a_compaction_is_skipped(compactable, tmp_path):
    for numbers in VERSIONS[:3]:
        compactable.append(numbers)
    ps.Engine(config_of()).run(compactable.spelling, limit=8, checkpoint=tmp_path / "c")
    compactable.compact()
    compactable.append(VERSIONS[3])
    engine = ps.Engine.restore(tmp_path / "c")
    assert engine.run(compactable.spelling, checkpoint=tmp_path / "c", resume=True).frames == 2
    assert engine.state_hash() == replayed(FRAMES[:10]).state_hash()


@pytest.mark.parametrize("change", ["delete", "overwrite"])
def test_a_version_that_removes_rows_is_bad_input_after_those_before_it(table, change):
    table.append(VERSIONS[0])
    table.append(VERSIONS[1])
    getattr(table, change)()
    engine = ps.Engine(config_of())
    with pytest.raises(InputError, match=r"version \d is an? .*a gradient that was applied cannot be taken back"):
        engine.run(table.spelling)
    assert engine.state_hash() == replayed(FRAMES[:4]).state_hash()


def test_versions_that_are_gone_are_an_incompatible_state(compactable, tmp_path):
    compactable.append(VERSIONS[0])
    compactable.append(VERSIONS[1])
    ps.Engine(config_of()).run(compactable.spelling, limit=3, checkpoint=tmp_path / "c")
    compactable.compact()
    compactable.forget()
    engine = ps.Engine.restore(tmp_path / "c")
    with pytest.raises(StateError, match=r"version \d is next, and (it|its file \S+) is no longer there"):
        engine.run(compactable.spelling, checkpoint=tmp_path / "c", resume=True)


def test_following_continues_with_new_versions_until_a_signal(table, tmp_path):
    config_of().save(tmp_path / "tables.pbtxt")
    table.append(VERSIONS[0])
    saving = ("--checkpoint", tmp_path / "c", "--every", 1)
    process = started("replay", tmp_path / "tables.pbtxt", table.spelling, "--follow", *saving)

    def has_committed(step):
        assert process.poll() is None, process.communicate()
        return Folder(tmp_path / "c").numbers() and ps.Engine.restore(tmp_path / "c").global_step == step

    until(lambda: has_committed(3))
    table.append(VERSIONS[1])
    table.append(VERSIONS[2])
    until(lambda: has_committed(8))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert ps.Engine.restore(tmp_path / "c").state_hash() == replayed(FRAMES[:8]).state_hash()


def test_a_plain_directory_names_the_spelling(table, tmp_path, refused, capsys):
    config_of().save(tmp_path / "tables.pbtxt")
    table.append(VERSIONS[0])
    line = refused(2, "replay", tmp_path / "tables.pbtxt", table.path)
    spelling = "iceberg:CATALOG/NAMESPACE.TABLE" if table.spelling.startswith("iceberg") else table.spelling
    rest = f"is a table with versions; give {spelling}, or --as-files for all of its files"
    assert line == f"penstock: {table.path}: {rest}\n"


def test_as_files_reads_a_directory_as_before(tmp_path, capsys):
    table = Delta(tmp_path)
    config_of().save(tmp_path / "tables.pbtxt")
    table.append(VERSIONS[0])
    code, report, _ = outcome(capsys, "replay", tmp_path / "tables.pbtxt", table.path, "--as-files")
    assert (code, report["state_hash"]) == (0, replayed(FRAMES[:3]).state_hash())


def test_a_table_that_does_not_exist_or_has_no_library(tmp_path, refused, monkeypatch):
    config_of().save(tmp_path / "tables.pbtxt")
    for scheme in ("delta", "lance"):
        pytest.importorskip({"delta": "deltalake"}.get(scheme, scheme))
        line = refused(3, "replay", tmp_path / "tables.pbtxt", f"{scheme}:{tmp_path}/none")
        assert line.startswith(f"penstock: {scheme}:{tmp_path}/none: the table cannot be read: ")
    line = refused(2, "replay", tmp_path / "tables.pbtxt", "delta:")
    assert line == "penstock: delta:: expected delta:URI\n"
    line = refused(2, "replay", tmp_path / "tables.pbtxt", "iceberg:rows")
    assert line == "penstock: iceberg:rows: expected iceberg:CATALOG/NAMESPACE.TABLE\n"


def test_bad_rows_are_named_by_version_file_and_row(tmp_path):
    table = Delta(tmp_path)
    table.append([0])
    bad = FRAMES[1].set_column(0, "id", pa.array(np.full(FRAMES[1].num_rows, 600)))
    table.library.write_deltalake(table.path, pa.Table.from_batches([bad]), mode="append")
    with pytest.raises(InputError, match=r"rows\.delta, version 1, .*: row 0, column 'id': expected 0 <= id"):
        ps.Engine(config_of()).run(table.spelling)


def test_an_iceberg_table_that_was_rolled_back_is_an_incompatible_state(tmp_path, monkeypatch):
    table = new_table(Iceberg, tmp_path, monkeypatch)
    table.append([0])
    first = table.table.current_snapshot().snapshot_id
    table.append([1])
    for stop in (1, 2):
        ps.Engine(config_of()).run(table.spelling, limit=stop, checkpoint=tmp_path / f"{stop}")
    table.table.manage_snapshots().rollback_to_snapshot(first).commit()
    table.append([2])
    engine = ps.Engine.restore(tmp_path / "1")
    engine.run(table.spelling, checkpoint=tmp_path / "1", resume=True)
    assert engine.state_hash() == replayed([FRAMES[0], FRAMES[2]]).state_hash()
    with pytest.raises(
        StateError, match="the tables contain version 2, and the table was rolled back to one before it"
    ):
        ps.Engine.restore(tmp_path / "2").run(table.spelling, checkpoint=tmp_path / "2", resume=True)


def test_an_iceberg_snapshot_with_files_of_deletes_is_refused(tmp_path, monkeypatch):
    table = new_table(Iceberg, tmp_path, monkeypatch)
    table.append([0])
    from pyiceberg.manifest import ManifestContent, ManifestFile

    monkeypatch.setattr(ManifestFile, "content", ManifestContent.DELETES)  # as a snapshot of other writers has it
    with pytest.raises(InputError, match="version 1 is an append with files of deletes"):
        ps.Engine(config_of()).run(table.spelling)


def test_a_hudi_table_is_not_read_as_files(tmp_path, refused):
    config_of().save(tmp_path / "tables.pbtxt")
    (tmp_path / "rows" / ".hoodie").mkdir(parents=True)
    line = refused(2, "replay", tmp_path / "tables.pbtxt", tmp_path / "rows")
    assert "is a table with versions; give a copy of its rows (Hudi is not read), or --as-files for all" in line
