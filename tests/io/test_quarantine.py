"""``--on-bad-row quarantine=FILE``: what lands in the file, when it is whole, and that it can be replayed."""

import errno

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from cli import SGD, outcome, table
from faults.operations import failing
from ipc import write
from quarantines import COLUMNS, read, rows_of

import penstock as ps
from penstock.base.filesystem import atomic_files
from penstock.cli import main

GOOD, BAD = ("user", 1, [1.0, 2.0]), ("user", 99, [1.0, 2.0])
LISTS = pa.list_(pa.float32())


def batch(step, *rows, ids=None, gradients=LISTS):
    """Rows of (table, id, gradient)."""
    columns = {
        "table": pa.array([r[0] for r in rows], pa.utf8()),
        "id": pa.array([r[1] for r in rows], ids or pa.int64()),
        "gradient": pa.array([r[2] for r in rows], gradients),
    }
    if step is not None:
        columns["step"] = pa.array([step] * len(rows), pa.int64())
    return pa.RecordBatch.from_pydict(columns)


CONFIG = table("user", 50, 2, SGD, "constant: 1.0") + table("item", 20, 3, SGD, "constant: 1.0") + "mode: TRAINING\n"


@pytest.fixture
def replay(config, capsys):
    """replay(words…) → (exit code, the object that --json prints, stderr)"""
    return lambda *words: outcome(capsys, "replay", config, *words)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "bad.arrows"


@pytest.fixture
def quarantined(replay, file, tmp_path):
    """quarantined(batches…): replays a log of them and puts their bad rows into the file; returns as replay"""

    def run(*batches, file=file):
        return replay(write(tmp_path / "log.arrows", batches), "--on-bad-row", f"quarantine={file}")

    return run


def test_every_kind_of_bad_row_is_quarantined_unchanged(quarantined, file, tmp_path):
    first = [
        GOOD,
        ("User", 2, [1.0, 2.0]),
        (None, 2, [1.0, 2.0]),
        ("user", None, [1.0, 2.0]),
        ("user", 50, [3.0, 4.0]),
        ("item", -1, [1.0, 2.0, 3.0]),
    ]
    second = [
        ("user", 1, None),
        ("user", 2, [1.0, None]),
        ("user", 3, [1.0]),
        ("item", 4, []),
        GOOD,
        ("user", 5, [float("nan"), float("-inf")]),
    ]
    code, report, _ = quarantined(batch(7, *first), batch(8, *second))
    actual = rows_of(file)
    assert code == 0
    assert [list(row) for row in actual] == [COLUMNS] * 10
    assert {row["source"] for row in actual} == {str(tmp_path / "log.arrows")}
    assert [(row["batch"], row["row_index"]) for row in actual] == [
        *((0, row) for row in range(1, 6)),
        *((1, row) for row in (0, 1, 2, 3, 5)),
    ]
    assert [row["table"] for row in actual] == ["User", None, "user", "user", "item", *["user"] * 3, "item", "user"]
    assert [row["id"] for row in actual] == [2, 2, None, 50, -1, 1, 2, 3, 4, 5]
    assert [row["origin_step"] for row in actual] == [7] * 5 + [8] * 5
    assert [row["reason"] for row in actual] == [
        *["unknown_table"] * 2,
        "id_null",
        *["id_out_of_range"] * 2,
        *["gradient_null"] * 2,
        *["length_mismatch"] * 2,
        "gradient_not_finite",
    ]
    assert [row["gradient"] for row in actual[3:9]] == [[3, 4], [1, 2, 3], None, [1, None], [1], []]
    assert np.isnan(actual[9]["gradient"][0])
    assert actual[9]["gradient"][1] == -np.inf
    assert report["quarantine"] == str(file)


def test_the_report_and_the_tables_are_those_of_drop(replay, quarantined, tmp_path):
    _, aside, _ = quarantined(batch(0, GOOD, BAD), batch(1, GOOD))
    _, dropped, _ = replay(tmp_path / "log.arrows", "--on-bad-row", "drop")
    for key in ("state_hash", "rows", "frames", "dropped", "steps", "tables"):
        assert aside[key] == dropped[key]
    assert aside["dropped"] == {"id_out_of_range": 1}


@pytest.mark.parametrize("kind", [pa.uint64(), pa.int8(), pa.uint16()])
def test_ids_of_any_integer_type_are_quarantined(kind, quarantined, file):
    largest = 2**64 - 1 if kind == pa.uint64() else 100
    quarantined(batch(0, ("user", 60, [1.0, 2.0]), ("user", largest, [1.0, 2.0]), ids=kind))
    actual = [(row["id"], row["id_text"]) for row in rows_of(file)]
    assert actual == [(60, None), (None, str(largest)) if kind == pa.uint64() else (100, None)]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float32(), 2),
        pa.list_(pa.float64(), 2),
        pa.large_list(pa.float16()),
        pa.fixed_shape_tensor(pa.float32(), [2]),
        pa.list_(pa.field("v", pa.uint16(), metadata={"dtype": "bfloat16"})),
    ],
    ids=str,
)
def test_gradients_of_any_type_are_quarantined(kind, quarantined, file):
    storage = getattr(kind, "storage_type", kind)
    batch_, nan = (0x3F80, 0x7FC0) if storage.value_type == pa.uint16() else (np.float16(1), np.float16("nan"))
    values = pa.array([[batch_, batch_], [batch_, nan], None, [batch_, None], [batch_, batch_]], storage)
    column = pa.ExtensionArray.from_storage(kind, values) if storage is not kind else values
    whole = pa.RecordBatch.from_pydict({"table": ["user"] * 5, "id": [1, 1, 1, 1, 99], "gradient": column})
    quarantined(whole.slice(1))
    first, *rest = (row["gradient"] for row in rows_of(file))
    assert np.isnan(first[1])
    assert rest == [None, [1, None], [1, 1]]


def test_a_quarantine_without_bad_rows_is_an_empty_file(quarantined, tmp_path):
    for name in ("bad.arrows", "bad.arrow"):
        assert quarantined(batch(0, GOOD), file=tmp_path / name)[0] == 0
        assert rows_of(tmp_path / name) == []


def test_the_suffix_says_which_arrow_format(quarantined, tmp_path):
    for name, start in (("a.arrow", b"ARROW1"), ("a.feather", b"ARROW1"), ("a.arrows", b"\xff\xff\xff\xff")):
        quarantined(batch(0, BAD), file=tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
        assert [row["id"] for row in rows_of(tmp_path / name)] == [99]
    code, output, _ = quarantined(batch(0, BAD), file=tmp_path / "a.parquet")
    assert (code, "name it .arrows" in output["error"]) == (2, True)


def test_a_parquet_source_has_rows_and_no_batches(replay, file, tmp_path):
    table = pa.Table.from_batches([batch(0, GOOD, GOOD, BAD)])
    pa.parquet.write_table(table, tmp_path / "log.parquet")
    replay(tmp_path / "log.parquet", "--on-bad-row", f"quarantine={file}")
    (row,) = rows_of(file)
    assert (row["batch"], row["row_index"]) == (None, 2)


def test_one_frame_is_one_batch_of_the_quarantine(quarantined, file):
    quarantined(batch(0, BAD), batch(0, BAD, GOOD), batch(1, BAD), batch(2, GOOD))
    assert [batch_.num_rows for batch_ in read(file)] == [2, 1]


def test_bad_rows_of_a_stale_frame_are_quarantined(quarantined, file):
    _, report, _ = quarantined(batch(5, GOOD), batch(0, BAD))
    assert (report["stale"], report["dropped"]) == (1, {"id_out_of_range": 1})
    assert [row["origin_step"] for row in rows_of(file)] == [0]


def test_after_an_error_the_file_holds_the_bad_rows_of_the_frames_applied(replay, tmp_path):
    batches = [batch(step, GOOD, BAD) for step in range(4)]
    path = tmp_path / "log.arrows"
    write(path, batches)
    path.write_bytes(path.read_bytes()[:-40])
    code, output, _ = replay(path, "--on-bad-row", f"quarantine={tmp_path / 'bad.arrow'}")
    assert (code, "cut" in output["error"]) == (3, True)
    # The third frame was not known to be whole.
    assert [row["origin_step"] for row in rows_of(tmp_path / "bad.arrow")] == [0, 1]


def test_an_interrupt_leaves_a_whole_file(file, tmp_path, config):
    log = write(tmp_path / "log.arrows", [batch(step, GOOD, BAD) for step in range(9)])
    engine = ps.Engine(ps.EmbeddingConfig.load(config))

    def stop(counters, gate, share):
        if counters.frames == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(log, on_bad_row=f"quarantine={file}", progress=stop)
    assert [row["origin_step"] for row in rows_of(file)] == [0, 1, 2]


def test_an_existing_file_is_not_touched(quarantined, file):
    file.write_text("mine")
    code, output, err = quarantined(batch(0, GOOD))
    assert (code, err.count("\n"), file.read_text()) == (2, 1, "mine")
    assert "exists; it is never written over" in output["error"]


@pytest.mark.parametrize("value", ["quarantine", "quarantine=", "skip", "drop=x", ""])
def test_unknown_values_of_on_bad_row_are_refused(value, replay, tmp_path):
    code, output, _ = replay(write(tmp_path / "log.arrows", [batch(0, GOOD)]), "--on-bad-row", value)
    assert (code, "on_bad_row" in output["error"]) == (2, True)


def test_an_unwritable_quarantine_is_an_error_before_the_run(quarantined, tmp_path):
    (tmp_path / "file").write_text("")
    code, output, _ = quarantined(batch(0, GOOD), file=tmp_path / "file" / "bad.arrows")
    assert (code, "directory" in output["error"]) == (6, True)


def test_a_repaired_quarantine_is_replayed_one_frame_per_batch_and_never_stale(
    replay, quarantined, file, tmp_path, config
):
    quarantined(batch(0, BAD), batch(5, BAD), batch(6, BAD, BAD))
    repaired = []
    for batch_ in read(file):
        ids = pa.array([7] * batch_.num_rows, pa.int64())
        repaired.append(batch_.set_column(batch_.schema.get_field_index("id"), "id", ids))
    ps.Engine(ps.EmbeddingConfig.load(config)).write_tables(tmp_path / "tables")
    code, report, _ = replay(write(tmp_path / "repaired.arrows", repaired), "--init", tmp_path / "tables")
    assert code == 0
    assert [report[key] for key in ("frames", "steps", "stale", "rows")] == [3, 3, 0, 4]


def test_an_unrepaired_quarantine_is_refused_for_the_same_reasons(replay, quarantined, file, config, capsys):
    _, first, _ = quarantined(batch(0, BAD, ("user", 1, [1.0]), ("user", 1, None)))
    _, again, _ = replay(file, "--on-bad-row", "drop")
    assert again["dropped"] == first["dropped"]
    assert main(["validate", str(config), str(file)]) == 3
    assert "[id_out_of_range]" in capsys.readouterr().out


def test_inspect_counts_the_reasons_of_a_quarantine(quarantined, file, call):
    quarantined(batch(3, BAD, ("user", 1, [1.0]), ("user", 98, [1.0, 1.0])))
    text, result = call(0, "inspect", file)
    (part,) = result["parts"]
    assert "quarantine of bad rows: id_out_of_range 2, length_mismatch 1" in text
    assert part["reasons"] == {"id_out_of_range": 2, "length_mismatch": 1}


def test_a_quarantine_on_a_full_disk_is_exit_6(quarantined, tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_files, "operations", failing(2, errno.ENOSPC, also_after=True))
    code, output, err = quarantined(*[batch(step, GOOD, BAD) for step in range(9)])
    assert (code, err.count("\n")) == (6, 1)
    assert "bad.arrows" in output["error"]
    assert list(tmp_path.glob("*bad*")) == list(tmp_path.glob(".*")) == []
