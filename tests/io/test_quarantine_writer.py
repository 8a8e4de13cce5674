"""The writer of a quarantine as a checkpoint uses it: committed rows stay, whatever fails or is killed after."""

import errno
import json

import pyarrow as pa
import pytest
from faults.operations import failing, short_write
from quarantines import COLUMNS, rows_of

import penstock as ps
from penstock.filesystem import atomic_files
from penstock.io.quarantine import QuarantineWriter


def aside(number):
    from penstock.io.decoding.bad_rows import SCHEMA

    row = dict.fromkeys(COLUMNS) | {"source": "log", "row_index": number, "reason": "id_null", "gradient": [1.0]}
    return [pa.RecordBatch.from_pylist([row], schema=SCHEMA)]


def kill(writer):
    """Its process is gone: what it wrote stays as it is."""
    writer._growing.flush()
    writer._growing.abandon()


@pytest.mark.parametrize("name", ["bad.arrows", "bad.arrow"])
@pytest.mark.parametrize("num_committed", [0, 1, 3])
def test_a_killed_run_resumes_at_its_last_commit(name, num_committed, tmp_path):
    unbroken = QuarantineWriter(tmp_path / f"unbroken-{name}")
    killed = QuarantineWriter(tmp_path / name)
    for number in range(num_committed):
        killed.append(aside(number))
    committed = json.loads(json.dumps(killed.commit()))
    killed.append(aside(99))  # never committed
    kill(killed)
    resumed = QuarantineWriter(tmp_path / name, committed)
    for number in range(num_committed, 5):
        resumed.append(aside(number))
    for number in range(5):
        unbroken.append(aside(number))
    resumed.close()
    unbroken.close()
    assert [row["row_index"] for row in rows_of(tmp_path / name)] == list(range(5))
    assert (tmp_path / name).read_bytes() == (tmp_path / f"unbroken-{name}").read_bytes()


@pytest.mark.parametrize("name", ["bad.arrows", "bad.arrow"])
def test_a_finished_run_can_be_continued(name, tmp_path):
    first = QuarantineWriter(tmp_path / name)
    first.append(aside(0))
    committed = first.commit()
    first.close()
    second = QuarantineWriter(tmp_path / name, committed)
    assert not (tmp_path / name).exists()
    second.append(aside(1))
    second.close()
    assert [row["row_index"] for row in rows_of(tmp_path / name)] == [0, 1]


def test_another_file_than_the_checkpoints_is_refused(tmp_path):
    for name in ("a.arrows", "b.arrows"):
        writer = QuarantineWriter(tmp_path / name)
        writer.append(aside(ord(name[0])))
        committed = writer.commit()
        writer.close()
    with pytest.raises(ps.StateError, match="other rows than the checkpoint records"):
        QuarantineWriter(tmp_path / "a.arrows", committed)
    with pytest.raises(ps.StateError, match="cannot be read"):
        QuarantineWriter(tmp_path / "none.arrows", committed)
    assert rows_of(tmp_path / "b.arrows")


def test_a_file_created_in_the_meantime_is_not_replaced(tmp_path):
    writer = QuarantineWriter(tmp_path / "bad.arrows")
    committed = writer.commit()
    kill(writer)
    (tmp_path / "bad.arrows").write_text("mine")
    with pytest.raises(ps.UsageError, match="exists"):
        QuarantineWriter(tmp_path / "bad.arrows", committed)


def every_call(monkeypatch, tmp_path, work, make):
    """Run ``work`` with the n-th file operation going wrong, n = 1, 2, … until one run gets through."""
    for number in range(1, 100):
        folder = tmp_path / str(number)
        folder.mkdir()
        operations = make(number)
        with monkeypatch.context() as patch:
            patch.setattr(atomic_files, "operations", operations)
            failed = None
            try:
                work(folder)
            except OSError as error:
                failed = error
        if len(operations.calls) < number:
            return
        yield folder, failed
    raise AssertionError("no run got through")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("make", [failing, short_write])
def test_a_file_operation_that_fails_leaves_the_last_commit(make, code, monkeypatch, tmp_path):
    committed = {}

    def work(folder):
        committed.clear()
        writer = QuarantineWriter(folder / "bad.arrow")
        try:
            for number in range(3):
                writer.append(aside(number))
                committed.update(writer.commit())
        finally:
            writer.close()

    num_failed = 0
    for folder, failed in every_call(monkeypatch, tmp_path, work, lambda n: make(n, *[code] * (make is failing))):
        if failed is None:
            continue
        num_failed += 1
        assert str(folder) in str(failed.filename)
        if not committed:
            assert [path for path in folder.iterdir() if path.name.startswith(".")] == []
            continue
        rest = QuarantineWriter(folder / "bad.arrow", dict(committed))
        rest.append(aside(9))
        rest.close()
        assert [row["row_index"] for row in rows_of(folder / "bad.arrow")] == [*range(committed["rows"]), 9]
    assert num_failed >= 5
