"""Tables with versions, for tests: frames in versions, and writers of each format."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from services import frame

FRAMES = [frame(number, rows=3 + number % 4, step=number) for number in range(24)]
# Versions end a frame; a file may end inside one.
VERSIONS = [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9], [10, 11]]


def rows_of(numbers):
    """The rows of frames as a table."""
    return pa.Table.from_batches([FRAMES[number] for number in numbers]).combine_chunks()  # writers reorder batches


class Delta:
    """A Delta Lake table."""

    def __init__(self, folder):
        self.library = pytest.importorskip("deltalake")
        self.path = str(folder / "rows.delta")
        self.spelling = f"delta:{self.path}"

    def append(self, numbers, **options):
        self.library.write_deltalake(self.path, rows_of(numbers), mode="append", **options)

    def commit(self, *actions):
        """Write a version of the log, as another writer does. Returns its number."""
        log = Path(self.path, "_delta_log")
        version = max((int(file.stem) for file in log.glob("*.json")), default=-1) + 1
        actions = ({"commitInfo": {"operation": "TEST"}}, *actions)
        (log / f"{version:020d}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))
        return version

    def actions(self, kind, version=0):
        """The actions of one kind of a version."""
        lines = Path(self.path, "_delta_log", f"{version:020d}.json").read_text().splitlines()
        return [action[kind] for action in map(json.loads, lines) if kind in action]

    def add(self, numbers, path="more.parquet", encoded=None, **options):
        """Write a file of frames, and return the action that adds it. encoded : its path in the log"""
        file = Path(self.path, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        pa.parquet.write_table(options.pop("rows", None) or rows_of(numbers), file)
        sizes = {"size": file.stat().st_size, "modificationTime": 0, "partitionValues": {}, "dataChange": True}
        return {"add": {"path": encoded or path, **sizes, **options}}

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


KINDS = [Delta, Lance, Iceberg]


def new_table(kind, folder, monkeypatch):
    """A table of a kind in a folder."""
    return kind(folder, monkeypatch) if kind is Iceberg else kind(folder)
