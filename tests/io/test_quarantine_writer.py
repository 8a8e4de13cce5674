"""The writer of a quarantine as a checkpoint uses it: committed rows stay, whatever fails or is killed after."""

import errno

import pyarrow as pa
import pytest
from faults.operations import failing, short_write
from quarantines import COLUMNS, rows_of

import penstock as ps
from penstock.base.filesystem import atomic_files
from penstock.io.quarantine import QuarantineWriter


def aside(number):
    from penstock.io.decoding.bad_rows import SCHEMA

    row = dict.fromkeys(COLUMNS) | {"source": "log", "row_index": number, "reason": "id_null", "gradient": [1.0]}
    return [pa.RecordBatch.from_pylist([row], schema=SCHEMA)]


def kill(writer):
    """Its process is gone: what it wrote stays as it is."""
    writer._growing.flush()
    writer._growing.abandon()


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
