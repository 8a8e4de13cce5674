"""Replays of tables with versions: rows in the order in which they were appended, each once."""

import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from at_0db4065 import replaying
from cli import outcome, started
from limits import HANG_S, until
from services import config_of, frame, replayed

import penstock as ps
from penstock.checkpoint.store import Folder
from penstock.errors import InputError, StateError

FRAMES = [frame(number, rows=3 + number % 4, step=number) for number in range(24)]
# Versions end a frame; a file may end inside one.
VERSIONS = [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9], [10, 11]]


def rows_of(numbers):
    return pa.Table.from_batches([FRAMES[number] for number in numbers]).combine_chunks()  # writers reorder batches


class Delta:
    """A Delta Lake table."""

    def __init__(self, folder):
        self.library = pytest.importorskip("deltalake")
        self.path = str(folder / "rows.delta")
        self.spelling = f"delta:{self.path}"

    def append(self, numbers, **options):
        self.library.write_deltalake(self.path, rows_of(numbers), mode="append", **options)

    def compact(self):
        self.library.DeltaTable(self.path).optimize.compact()

    def delete(self):
        self.library.DeltaTable(self.path).delete("id < 250")

    def overwrite(self):
        self.library.write_deltalake(self.path, rows_of([0]), mode="overwrite")

    def create_again(self):
        shutil.rmtree(self.path)

    def forget(self):
        """Remove the files of the versions before the last one."""
        self.library.DeltaTable(self.path).vacuum(0, enforce_retention_duration=False, dry_run=False)


class Lance:
    """A Lance dataset."""

    def __init__(self, folder):
        self.library = pytest.importorskip("lance")
        self.path = str(folder / "rows.lance")
        self.spelling = f"lance:{self.path}"
        self.exists = False

    def append(self, numbers):
        self.library.write_dataset(rows_of(numbers), self.path, mode="append" if self.exists else "create")
        self.exists = True

    def compact(self):
        self.library.dataset(self.path).optimize.compact_files()

    def delete(self):
        self.library.dataset(self.path).delete("id < 250")

    def overwrite(self):
        self.library.write_dataset(rows_of([0]), self.path, mode="overwrite")

    def create_again(self):
        shutil.rmtree(self.path)
        self.exists = False

    def forget(self):
        from datetime import timedelta

        self.library.dataset(self.path).cleanup_old_versions(timedelta(0))


class Iceberg:
    """An Iceberg table in a catalog that is a SQLite file."""

    def __init__(self, folder, monkeypatch):
        pytest.importorskip("pyiceberg")
        pytest.importorskip("sqlalchemy")
        import pyiceberg.catalog
        from pyiceberg.utils.config import Config

        for key, value in {
            "TYPE": "sql",
            "URI": f"sqlite:///{folder}/catalog.db",
            "WAREHOUSE": f"file://{folder}",
        }.items():
            monkeypatch.setenv(f"PYICEBERG_CATALOG__TESTS__{key}", value)
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # read at the first import
        self.catalog = pyiceberg.catalog.load_catalog("tests")
        self.catalog.create_namespace("training")
        self.table = self.catalog.create_table("training.rows", rows_of([0]).schema)
        self.path = str(folder / "training" / "rows")
        self.spelling = "iceberg:tests/training.rows"

    def append(self, numbers):
        self.table.append(rows_of(numbers))

    def delete(self):
        self.table.delete("id < 250")

    def overwrite(self):
        self.table.overwrite(rows_of([0]))

    def create_again(self):
        self.catalog.drop_table("training.rows")
        self.table = self.catalog.create_table("training.rows", rows_of([0]).schema)


@pytest.fixture(params=[Delta, Lance, Iceberg])
def table(request, tmp_path, monkeypatch):
    if request.param is Iceberg:
        return Iceberg(tmp_path, monkeypatch)
    return request.param(tmp_path)


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
    with pytest.raises(StateError, match=r"version \d is next, and it is no longer there"):
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


CREATED_AGAIN = "the table was deleted and created again (expected "


@pytest.mark.parametrize("stop", [3, 4, None])  # inside a version, at the end of one, and at the end
@pytest.mark.parametrize("num_versions", [1, 3, 5], ids=["shorter", "equal", "longer"])
def test_a_table_that_was_created_again_is_refused(table, tmp_path, stop, num_versions):
    for numbers in VERSIONS[:3]:
        table.append(numbers)
    ps.Engine(config_of()).run(table.spelling, limit=stop, checkpoint=tmp_path / "c")
    table.create_again()
    for numbers in VERSIONS[-num_versions:]:
        table.append(numbers)
    engine = ps.Engine.restore(tmp_path / "c")
    with pytest.raises(StateError, match=re.escape(CREATED_AGAIN)) as raised:
        engine.run(table.spelling, checkpoint=tmp_path / "c", resume=True)
    assert str(raised.value).startswith(f"{table.spelling}: version ")
    assert str(raised.value).endswith("; use another checkpoint, or the former table")
    assert ps.Engine.restore(tmp_path / "c").state_hash() == replayed(FRAMES[: stop or 8]).state_hash()


def test_a_replay_that_follows_ends_when_its_table_is_created_again(table, tmp_path):
    config_of().save(tmp_path / "tables.pbtxt")
    table.append(VERSIONS[0])
    saving = ("--checkpoint", tmp_path / "c", "--every", 1)
    process = started("replay", tmp_path / "tables.pbtxt", table.spelling, "--follow", *saving)
    until(lambda: Folder(tmp_path / "c").numbers() and ps.Engine.restore(tmp_path / "c").global_step == 3)
    process.send_signal(signal.SIGSTOP)
    table.create_again()
    for numbers in VERSIONS:
        table.append(numbers)
    process.send_signal(signal.SIGCONT)
    _, error = process.communicate(timeout=HANG_S)
    assert (process.returncode, CREATED_AGAIN in error.decode()) == (5, True), error
    assert ps.Engine.restore(tmp_path / "c").state_hash() == replayed(FRAMES[:3]).state_hash()


@pytest.mark.parametrize(("kind", "library"), [("delta", "deltalake"), ("lance", "lance")])
def test_a_position_of_an_earlier_version_is_accepted_once(at_0db4065, call, refused, kind, library):
    pytest.importorskip(library)
    source = f"{kind}:versions/rows.{kind}"
    words = (*replaying("versions", source), "--checkpoint", f"versions/{kind}", "--resume")
    notes = [[note for note in call(0, *words)[1]["notes"] if note.startswith(f"{source}: ")] for _ in range(2)]
    assert [len(each) for each in notes] == [1, 0]
    assert "an earlier version of penstock wrote the position" in notes[0][0]
    shutil.copytree(f"versions/rows.{kind}", "rows")
    shutil.rmtree(f"versions/rows.{kind}")
    table = Delta(Path("versions")) if kind == "delta" else Lance(Path("versions"))
    for numbers in VERSIONS:
        table.append(numbers)
    assert CREATED_AGAIN in refused(5, *words)
    shutil.rmtree(f"versions/rows.{kind}")
    shutil.move("rows", f"versions/rows.{kind}")
    call(0, *words)


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


def test_a_partitioned_delta_table_has_its_columns(tmp_path):
    table = Delta(tmp_path)
    for number in range(3):
        table.append([number], partition_by=["step"])
    engine = ps.Engine(config_of())
    assert engine.run(table.spelling).frames == 3
    assert engine.state_hash() == replayed(FRAMES[:3]).state_hash()


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
