"""``blame`` and ``history``: which frames of a log contain a row, and its values in every commit that is kept."""

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from batches import batch
from checkpoints import LOG, ROWS, config_of, engine_of, log_of
from ipc import log, write
from sharing import LocalJob
from versions import rewrite, saved

import penstock as ps
from penstock.checkpoint.arrays import SavedTables

CONFIG = config_of()


# ---- blame


def scanned(batches, table, row_id, num_required=3):
    """The same by NumPy: (frame, contributor, step, opening, stale, rows, norm) of each frame with the row."""
    results, held, step = [], [], 0
    for number, rows in enumerate(batches):
        local_step = rows["step"][0].as_py()
        stale = local_step < step
        ids, names = rows["id"].to_numpy(), np.array(rows["table"].to_pylist())
        matches = np.flatnonzero((ids == row_id) & (names == table))
        if len(matches):
            total = sum(np.array(rows["gradient"][int(row)].as_py(), np.float32).astype(np.float64) for row in matches)
            contributor = rows["contributor"][0].as_py()
            results.append([number, contributor, local_step, None, stale, len(matches), np.linalg.norm(total)])
            held += [] if stale else [results[-1]]
        if not stale:
            step, held = opened(batches, number, step, held, num_required)
    return results


def opened(batches, number, step, held, num_required):
    """The step and the frames that the gate holds after a frame."""
    opened.count = getattr(opened, "count", 0) + 1 if number else 1
    if opened.count < num_required:
        return step, held
    opened.count = 0
    for entry in held:
        entry[3] = step + 1
    return step + 1, []


@pytest.fixture
def mixed():
    """Steps of three workers, of which one is late for some, so that its frames are stale."""
    batches = list(LOG)
    batches[7], batches[16] = batches[16], batches[7]
    batches[20], batches[30] = batches[30], batches[20]
    return batches


def fields(frame):
    names = ("frame", "contributor", "step", "opening", "stale", "rows")
    return [*(frame[name] for name in names), pytest.approx(float(frame["norm"]), rel=1e-6)]


@pytest.mark.parametrize("table", ["user", "item"])
@pytest.mark.parametrize("row_id", [1, 2, 3, 40, ROWS - 1])
def test_blame_lists_the_frames_that_a_scan_finds(table, row_id, mixed, config, tmp_path, call):
    log = write(tmp_path / "log.arrows", mixed)
    text, result = call(0, "blame", config, log, "--table", table, "--id", row_id, "--num-required", 3)
    assert [fields(frame) for frame in result["frames"]] == scanned(mixed, table, row_id)
    assert {frame["source"] for frame in result["frames"]} <= {str(log)}
    assert result["read"] == {"frames": len(mixed), "rows": sum(rows.num_rows for rows in mixed)}
    assert "checksums and other rows were not checked" in text


def test_the_openings_are_the_steps_of_the_deltas_that_change_the_row(mixed, config, tmp_path, call):
    log = write(tmp_path / "log.arrows", mixed)
    result = call(0, "blame", config, log, "--table", "user", "--id", 1, "--num-required", 3, "--flush")[1]
    assert any(frame["stale"] for frame in result["frames"])
    deltas = engine_of().stage(iter(mixed), flush=True)
    steps = {
        step
        for delta in deltas
        for table, row_id, step in zip(*(delta[name].to_pylist() for name in ("table", "id", "step")), strict=True)
        if (table, row_id) == ("user", 1)
    }
    assert {frame["opening"] for frame in result["frames"] if not frame["stale"]} == steps
    assert all(frame["opening"] is None for frame in result["frames"] if frame["stale"])


def test_blame_reads_as_replay_does(config, tmp_path, call):
    """Sources in turn, a limit, a table that rows do not name, other column names; frames that wait in the gate."""
    logs = log_of(range(4), 1), log_of(range(4), 1, seed=9)
    paths = [write(tmp_path / f"{number}.arrows", frames) for number, frames in enumerate(logs)]
    line = ["blame", config, *paths, "--table", "user", "--id", 1, "--num-required", 2, "--merge", "step"]
    result = call(0, *line, "--limit", 7)[1]
    both = [frame for pair in zip(*logs, strict=True) for frame in pair][:7]
    expected = scanned(both, "user", 1, 2)
    assert [frame["opening"] for frame in result["frames"]] == [entry[3] for entry in expected]
    assert [str(paths[entry[0] % 2]) for entry in expected] == [frame["source"] for frame in result["frames"]]
    assert [entry[0] // 2 for entry in expected] == [frame["frame"] for frame in result["frames"]]
    plain = batch([1, 2, 1], np.ones((3, 2)), step=None).rename_columns(["key", "gradient"])
    log = write(tmp_path / "plain.arrows", [plain, plain])
    line = ["blame", config, log, "--table", "item", "--id", 1, "--column", "id=key", "--num-required", 3]
    text, result = call(0, *line)
    assert [(frame["rows"], frame["opening"], frame["step"]) for frame in result["frames"]] == [(2, None, None)] * 2
    assert "  pending " in text
    note = f"rows of {log} name no table, and count as those of 'item': right only if it was replayed with --table item"
    assert f"note      {note}" in text
    assert note in result["notes"]


def test_blame_of_rows_that_name_their_table_needs_no_doubt(config, tmp_path, call):
    log = write(tmp_path / "log.arrows", LOG[:2])
    of_schema = batch([1], step=None).replace_schema_metadata({"penstock.table": "item"})
    named = write(tmp_path / "named.arrows", [of_schema])
    result = call(0, "blame", config, log, named, "--table", "user", "--id", 1)[1]
    assert not any("table" in note for note in result["notes"])
    assert all(frame["source"] == str(log) for frame in result["frames"])


def test_blame_of_a_log_with_a_wrong_checksum_still_reads_it(config, tmp_path, call):
    data = bytearray(log(LOG[:6]))
    gradient = np.float32(LOG[2]["gradient"][5].as_py()[0]).tobytes()
    place = data.index(gradient)
    data[place] ^= 1
    (tmp_path / "log.arrows").write_bytes(data)
    line = [config, tmp_path / "log.arrows", "--table", "user"]
    assert "checksum" in call(3, "replay", *line)[1]["error"]
    assert len(call(0, "blame", *line, "--id", 1)[1]["frames"]) == len(scanned(LOG[:6], "user", 1, 1))


def test_blame_finds_keys_of_both_types(tmp_path, call):
    tables = [
        ps.TableConfig(10, 2, name=name, optimizer=ps.SGD(0.1), dynamic=ps.Dynamic(key_type=name))
        for name in ("int64", "uint64")
    ]
    ps.EmbeddingConfig.from_tables(tables).save(tmp_path / "c.pbtxt")
    keys = pa.array([-5, 7, -5], pa.int64())
    for name, ids, key in (
        ("int64", keys, -5),
        ("uint64", pa.array([2**64 - 5, 7, 2**64 - 5], pa.uint64()), 2**64 - 5),
    ):
        rows = pa.table({"step": [0] * 3, "id": ids, "gradient": pa.array([[3.0, 4.0]] * 3, pa.list_(pa.float32(), 2))})
        log = write(tmp_path / f"{name}.arrows", rows.to_batches())
        (frame,) = call(0, "blame", tmp_path / "c.pbtxt", log, "--table", name, f"--id={key}")[1]["frames"]
        assert (frame["rows"], frame["norm"]) == (2, "10.0")


def test_blame_writes_arrow(config, tmp_path, call):
    log = write(tmp_path / "log.arrows", LOG[:6])
    for name, read in (("out.arrow", pa.ipc.open_file), ("out.arrows", pa.ipc.open_stream)):
        line = ["blame", config, log, "--table", "user", "--id", 1, "--out", tmp_path / name]
        result = call(0, *line)[1]
        with pa.OSFile(str(tmp_path / name)) as file:
            rows = read(file).read_all().to_pylist()
        assert [{**row, "norm": str(row["norm"])} for row in rows] == result["frames"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--id", "1"], "--table: name the table of the row: user, item"),
        (["--id", "1", "--table", "x"], "table 'x' is not in the configuration (user, item)"),
        (["--id", str(ROWS), "--table", "user"], f"table 'user': expected 0 <= id < {ROWS}, got {ROWS}"),
        (["--id=-1", "--table", "user"], "got -1"),
        (["--table", "user"], "--id"),
    ],
)
def test_a_row_that_cannot_be_is_a_usage_error(words, text, config, tmp_path, refused):
    log = write(tmp_path / "log.arrows", LOG[:3])
    assert text in refused(2, "blame", config, log, *words)


# ---- history


def values(version):
    return [np.float32(text) for text in version["row"]], {
        name: [np.float32(text) for text in texts] for name, texts in version["slots"].items()
    }


def check_history(folder, table, row_id, call):
    """Assert that every version has the values of the tables in its commit."""
    versions = call(0, "history", folder, "--table", table, "--id", row_id)[1]["versions"]
    before = None
    for version in versions:
        tables = SavedTables(f"{folder}@{version['step']}")
        keys = tables.keys(table)
        if keys is not None and row_id not in keys:
            assert (version["row"], version["slots"]) == (None, {})
            continue
        index = row_id if keys is None else keys.tolist().index(row_id)
        parts = tables.parts(table)
        row, slots = values(version)
        assert row == parts.pop("parameters")[index].tolist()
        assert slots == {name: rows[index].tolist() for name, rows in parts.items()}
        if before is None:
            assert version["change"] is None
        else:
            assert float(version["change"]) == pytest.approx(np.linalg.norm(np.float64(row) - np.float64(before)))
        before = row
    return versions


def test_history_has_the_values_of_every_commit_and_tag(tmp_path, call):
    engine, _ = saved(tmp_path / "run", range(2))
    ps.tag(tmp_path / "run", "start", 1)
    for number in range(12):
        if number % 4 == 0:
            rewrite(engine)
        saved(tmp_path / "run", [number], engine=engine)
        if number == 5:
            engine.tag("middle")
    for row_id in (0, 13, 59):
        versions = check_history(tmp_path / "run", "user", row_id, call)
        assert [version["tags"] for version in versions] == [["start"], ["middle"], [], [], []]
    text = call(0, "history", tmp_path / "run", "--table", "item", "--id", 3)[0]
    assert "step 1, [" in text
    assert "changed by 0, [" in text


def test_history_of_a_key_that_comes_and_goes(tmp_path, call):
    table = ps.TableConfig(4, 2, name="user", optimizer=ps.Adagrad(0.1), dynamic=ps.Dynamic(evict="lru"))
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    for step, keys in enumerate(([5, 6], [5], [7, 8, 9], [10, 11], [5, 12])):
        engine.apply({"user": (np.array(keys), np.ones((len(keys), 2), np.float32))})
        engine.save(tmp_path / "run")
        ps.tag(tmp_path / "run", f"t{step}")
    versions = check_history(tmp_path / "run", "user", 5, call)
    present = [version["row"] is not None for version in versions]
    assert (len(versions), present[0], present[-1], all(present)) == (5, True, True, False)
    assert check_history(tmp_path / "run", "user", 99, call)[0]["row"] is None


def test_history_of_a_job_of_shares(tmp_path, call):
    job = LocalJob(config_of(), 2)
    job.run([write(tmp_path / "log.arrows", LOG)], limit=12)
    job.commit(tmp_path / "run")
    for row_id in (1, 2, 700):
        check_history(tmp_path / "run", "user", row_id, call)


def test_history_writes_arrow(tmp_path, call):
    saved(tmp_path / "run", range(3))
    result = call(0, "history", tmp_path / "run", "--table", "user", "--id", 1, "--out", tmp_path / "out.arrow")[1]
    with pa.OSFile(str(tmp_path / "out.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.column_names == ["commit", "step", "tags", "change", "row", "accumulators"]
    assert table["row"].to_pylist() == [values(version)[0] for version in result["versions"]]


@pytest.mark.parametrize(
    ("code", "words", "text"),
    [
        (2, ["run", "--table", "x", "--id", "1"], "run: no table 'x'; there are: user, item"),
        (2, ["run", "--table", "user", "--id", "60"], "table 'user': expected 0 <= id < 60, got 60"),
        (2, ["run", "--table", "user"], "--id"),
        (5, ["nowhere", "--table", "user", "--id", "1"], "nowhere: no such checkpoint"),
    ],
)
def test_a_history_that_cannot_be_is_one_line(code, words, text, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "run", range(1))
    assert text in refused(code, "history", *words)


def test_a_damaged_file_is_named(tmp_path, monkeypatch, refused):
    saved(tmp_path / "run", range(2))
    (tmp_path / "run" / "00000002.delta").write_bytes(b"")
    assert "00000002.delta: cannot be read" in refused(5, "history", tmp_path / "run", "--table", "user", "--id", "1")
    (tmp_path / "run" / "00000002.delta").unlink()
    assert "00000002.delta: is missing" in refused(5, "history", tmp_path / "run", "--table", "user", "--id", "1")
