"""Folders of shared tables: one writer, no room, damaged and foreign files, other users, the next generation."""

import errno
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from engines import engine_of

import penstock as ps
import penstock.rows.shared.folder as shared_folder
import penstock.serving.shared.table_reader as table_reader
from penstock.serving.shared.table_writer import SharedTable, SharedWriter


@pytest.fixture
def folder(tmp_path):
    """The folder of a writer that has ended."""
    writer = SharedWriter(tmp_path / "tables")
    writer.create([SharedTable("t", 2, 100)])
    writer.publish(ps.Version("0"))
    writer.close()
    return tmp_path / "tables"


def test_files_are_those_of_their_owner(folder):
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "pages-1-1", "rows-1-0", "tables"]


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path):
    writer = SharedWriter(tmp_path)
    with pytest.raises(ps.StateError, match="another program writes the shared tables of this folder; stop it first"):
        SharedWriter(tmp_path)
    with pytest.raises(ps.StateError, match="another program writes"):
        engine_of(shared=tmp_path)
    writer.close()
    SharedWriter(tmp_path).close()


# jax warns of any fork.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:os.fork:RuntimeWarning")
def test_a_forked_process_neither_keeps_the_lock_nor_removes_files(tmp_path):
    writer = SharedWriter(tmp_path)
    writer.create([SharedTable("t", 2, 100)])
    (ready, say), (end, go) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(go)
        del writer  # as at the child's end
        os.write(say, b"r")
        os.read(end, 1)  # until its parent closes the pipe
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"r"
        writer.publish(ps.Version("0"))  # the files are there
        assert np.array_equal(ps.Reader(tmp_path).lookup("t", [3]), [[0, 0]])
        writer.close()
        SharedWriter(tmp_path).close()
    finally:
        os.close(go)
        os.waitpid(child, 0)
        for file in (ready, say, end):
            os.close(file)


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ps.UsageError, match=r"holds other files \(notes.txt\); choose a new folder"):
        engine_of(shared=tmp_path)
    (tmp_path / "notes.txt").rename(tmp_path / "tables")
    with pytest.raises(ps.UsageError, match=r"holds other files \(tables\)"):
        engine_of(shared=tmp_path)
    assert (tmp_path / "tables").read_text() == "mine"


def test_a_folder_without_tables_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ps.StateError, match=r"has no shared tables; start their writer first"):
            ps.Reader(path)


def test_no_room_is_one_line_and_leaves_no_file(tmp_path, monkeypatch):
    def full(file, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ps.CapacityError, match=r"no room for shared tables \([\d,]+ bytes of rows: No space left on"):
        engine_of(shared=tmp_path, rows=10)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


# ---- what a reader finds


def rewritten(folder, change=lambda description: None, magic=b"penstock", number=1, digest=None):
    """Write the header again with a changed description."""
    data = (folder / "tables").read_bytes()
    description = json.loads(data[4096:])
    change(description)
    text = json.dumps(description).encode()
    head = struct.pack("<8sII32s", magic, number, len(text), digest or hashlib.sha256(text).digest())
    (folder / "tables").write_bytes(head + data[len(head) : 4096] + text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": b"PK\3\4abcd"}, "is no header of shared tables"),
        ({"number": 3}, "has format 3, this version reads 1 and 2; use the version that wrote it"),
        ({"digest": b"0" * 32}, "damaged: its checksum does not match"),
    ],
)
def test_foreign_future_and_damaged_headers_are_distinguished(folder, change, message):
    rewritten(folder, **change)
    with pytest.raises(ps.StateError, match=message):
        ps.Reader(folder)


@pytest.mark.parametrize("length", [0, 7, 40, 4095, 4096, 4200])
def test_a_truncated_header_is_refused(folder, length):
    os.truncate(folder / "tables", length)
    with pytest.raises(ps.StateError, match=r"is no header of shared tables|truncated: "):
        ps.Reader(folder)


def set_table(**values):
    return lambda description: description["tables"][0].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_table(dim=0), "'dim': expected 1 to"),
        (set_table(dim=3), "damaged: the layout of a table is out of range"),
        (set_table(num_rows=2**40), "damaged: the layout of a table is out of range"),
        (set_table(num_rows=True), "'num_rows': expected a whole number, got True"),
        (set_table(rows_per_shard=2**47, num_rows=2**48), "damaged: the layout of a table is out of range"),
        (set_table(rows_per_shard=200), "damaged: expected 200 rows of 2 floats"),
        (set_table(first_float=-1), "'first_float': expected 0 to"),
        (set_table(first_float=1), "damaged: expected 100 rows of 2 floats"),
        (set_table(first_page=100), "damaged: expected counters of 2 pages"),
        (set_table(rows=["../../etc/passwd"]), "expected the name of a file of rows, pages or keys, got '../../etc"),
        (set_table(rows=["rows-9-9"]), "table 't': the file rows-9-9 is not listed"),
        (set_table(rows=[]), "table 't': 0 files of rows, 1 of pages"),
        (set_table(name="a\nb"), "'name': got"),
        (set_table(id_type="float"), "'id_type': got 'float'"),
        (set_table(keys=[1]), "'keys': expected four values"),
        (set_table(keys=["rows-1-0", 0, -1, ["zero", 0, 0, ""]]), "damaged: expected 710 words for 100 rows"),
        (set_table(keys=["rows-1-0", 0, -1, ["draw", 0, 0, ""]]), "'kind': got 'draw'"),
        (set_table(keys=["rows-1-0", 0, -1, ["normal", 0, 0, ""]]), "'key': got ''"),
        (lambda description: description.update(threads=0), "'threads': expected 1 to"),
        (lambda description: description.update(threads=7), "damaged: "),
        (lambda description: description.update(boot="another"), "were written before this machine started, or on ano"),
        (lambda description: description["files"].update({"rows-1-0": 10**9}), "rows-1-0: .* expected 1,000,000,000"),
        (lambda description: description["files"].pop("rows-1-0"), "the file rows-1-0 is not listed"),
        (lambda description: description.pop("files"), "'files': expected an object, got None"),
        (lambda description: description["tables"].append(description["tables"][0]), "two tables have one name"),
    ],
)
def test_every_field_of_a_header_is_checked(folder, change, message):
    rewritten(folder, change)
    with pytest.raises(ps.StateError, match=message):
        ps.Reader(folder)


def test_truncated_and_missing_files_are_named(folder):
    os.truncate(folder / "rows-1-0", 100)
    with pytest.raises(ps.StateError, match=r"rows-1-0: 100 bytes, expected .*: truncated, or of another header"):
        ps.Reader(folder)
    (folder / "rows-1-0").unlink()
    with pytest.raises(ps.StateError, match="has no shared tables"):
        ps.Reader(folder)
    os.mkfifo(folder / "rows-1-0")
    with pytest.raises(OSError, match="not a file"):
        ps.Reader(folder)


AS_ANOTHER = """
import os, sys
from penstock.serving.shared.table_reader import Reader
from penstock.serving.shared.table_writer import SharedWriter
os.setgid(65534); os.setuid(65534)
try:
    {"reader": Reader, "writer": SharedWriter}[sys.argv[1]](sys.argv[2])
except PermissionError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize(
    ("role", "message"),
    [("reader", "belong to another user, who alone may read them"), ("writer", "Permission denied: '{}/tables'")],
)
def test_another_user_is_refused_in_one_line(role, message):
    with tempfile.TemporaryDirectory() as folder:
        writer = SharedWriter(folder)
        writer.create([SharedTable("t", 2, 100)])
        writer.publish(ps.Version("0"))
        os.chmod(folder, 0o755)
        done = subprocess.run(
            [sys.executable, "-c", AS_ANOTHER, role, folder], capture_output=True, text=True, check=True
        )
        assert message.format(folder) in done.stdout
        assert done.stdout.count("\n") == 1


# ---- generations


def test_a_reader_continues_with_the_tables_of_the_next_start(tmp_path):
    engine = engine_of(shared=tmp_path, rows=10)
    engine.apply({"t": ([3], np.ones((1, 2)))})
    reader = ps.Reader(tmp_path)
    assert reader.version.step == 1
    del engine
    following = engine_of(shared=tmp_path, rows=2000)
    assert (reader.version.step, len(reader.lookup("t", [1999]))) == (0, 1)
    assert reader.lookup("t", [3]).tolist() == following.lookup("t", [3]).tolist()
    assert {path.name.split("-")[1] for path in tmp_path.iterdir() if "-" in path.name} == {"2"}


@pytest.mark.parametrize("removed", [True, False])
def test_a_reader_finds_new_tables_if_those_before_were_not_closed(tmp_path, monkeypatch, removed):
    monkeypatch.setattr(table_reader, "_LOOK_S", 0.0)
    folder = tmp_path / "tables"
    engine = engine_of(shared=folder)
    reader = ps.Reader(folder)
    if removed:
        del engine
        shutil.rmtree(folder)
        assert reader.version.step == 0  # the rows that there were
    else:  # a writer is killed after the rename of the next header, before it has closed the one before
        monkeypatch.setattr(shared_folder, "_closes", lambda path: lambda: None)
        del engine
    engine = engine_of(shared=folder)
    engine.apply({"t": ([3], np.ones((1, 2)))})
    assert reader.version.step == 1
    assert np.array_equal(reader.lookup("t", [3]), engine.lookup("t", [3]))


def test_restored_rows_are_shared_before_any_reader_sees_their_start(tmp_path):
    engine = engine_of(rows=10)
    engine.apply({"t": ([3], np.ones((1, 2)))})
    engine.save(tmp_path / "checkpoint")
    restored = ps.Engine.restore(tmp_path / "checkpoint", shared=tmp_path / "shared")
    reader = ps.Reader(tmp_path / "shared")
    assert (reader.version.step, reader.durable_step) == (1, 1)
    assert reader.lookup("t", [3]).tolist() == restored.lookup("t", [3]).tolist() == engine.lookup("t", [3]).tolist()


def test_tables_on_devices_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", "xla")
    with pytest.raises(ps.ConfigError, match=r"table t: its rows are not in the host's memory .* omit --shared"):
        engine_of(shared=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


# ---- a writer without an engine


@pytest.fixture
def writer(tmp_path):
    writer = SharedWriter(tmp_path)
    writer.create([SharedTable("user", 3, 100), SharedTable("key", 2, 4, "uint64", has_keys=True)])
    writer.publish(ps.Version("lineage-epoch-7"), 6)
    yield writer
    writer.close()


def test_rows_are_written_by_id_and_read_after_the_step(writer, tmp_path):
    reader = ps.Reader(tmp_path)
    assert (reader.version, reader.durable_step) == (ps.Version("lineage-epoch-7"), 6)
    with writer.step(ps.Version("lineage-next-8"), 8):
        writer.write("user", [5, 99], np.ones((2, 3)))
        with pytest.raises(ps.ReadTimeoutError, match="step 8 runs"):
            reader.lookup("user", [5], consistent=True, timeout_ms=0)
    assert reader.lookup("user", [99, 0, 5]).tolist() == [[1] * 3, [0] * 3, [1] * 3]
    assert (reader.version, reader.durable_step) == (ps.Version("lineage-next-8"), 8)


def test_keys_come_go_and_outgrow_their_table(writer, tmp_path):
    reader, largest = ps.Reader(tmp_path), 2**64 - 1
    with writer.step(ps.Version("8")):
        writer.write("key", np.array([largest, 7], np.uint64), np.array([[1, 1], [2, 2]]))
    assert reader.lookup("key", [7, 8, largest]).tolist() == [[2, 2], [0, 0], [1, 1]]
    with writer.step(ps.Version("9")):
        writer.remove("key", [7, 1000])
        writer.write("key", [8], np.array([[3, 3]]))
        writer.write("user", [1], np.full((1, 3), 4))
    assert reader.lookup("key", [7, 8]).tolist() == [[0, 0], [3, 3]]
    keys = np.arange(100, 200, dtype=np.uint64)
    with writer.step(ps.Version("10")):
        writer.write("key", keys, np.repeat(keys, 2).reshape(-1, 2))  # more than the table has rows
        with pytest.raises(ps.ReadTimeoutError):
            reader.lookup("key", keys, consistent=True, timeout_ms=0)
    assert reader.lookup("key", keys)[:, 1].tolist() == keys.tolist()
    assert reader.lookup("key", [8, largest]).tolist() == [[3, 3], [1, 1]]
    assert reader.lookup("user", [1]).tolist() == [[4] * 3]
    assert reader.version.step == 10


def test_an_error_within_a_step_closes_the_tables_to_readers(writer, tmp_path):
    reader = ps.Reader(tmp_path)
    with pytest.raises(ps.UsageError, match="expected 0 <= id < 100"), writer.step(ps.Version("8")):
        writer.write("user", [100], np.ones((1, 3)))
    with pytest.raises(ps.StateError, match="a step of its writer failed half way"):
        reader.lookup("user", [5])
    writer.create([SharedTable("user", 3, 100)])
    writer.publish(ps.Version("8"))
    assert reader.tables == ("user",)
