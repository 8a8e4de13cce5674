"""``penstock validate``, ``inspect`` and ``demo``."""

import json
import re

import pyarrow as pa
import pyarrow.parquet
import pytest
from batches import batch
from cli import ONE_TABLE, frame
from ipc import write

import penstock as ps
import penstock.cli.demo
from penstock.cli import main
from penstock.model.config.engine_config_pb2 import TableSettings

CONFIG = ONE_TABLE
NO_FORMULA = CONFIG.replace("adagrad {}", "mdl_adagrad_light {}")


def text(path, content):
    path.write_text(content)
    return path


@pytest.fixture
def call(call, capsys):
    """The same, after checking that people read the same without --json."""

    def run(code, *words):
        assert main([*map(str, words)]) == code
        output = capsys.readouterr().out
        text, result = call(code, *words)
        assert output == text
        return text, result

    return run


# ---- validate


def test_validate_of_a_sound_configuration_alone(config, call):
    output, result = call(0, "validate", config)
    assert "nothing to remark" in output
    assert result["findings"] == result["sources"] == []


def test_validate_says_what_memory_the_tables_and_their_slots_need(tmp_path, call):
    user = ps.TableConfig(1_000_000, 16, name="user", optimizer=ps.Adam())  # 2 slots
    item = ps.TableConfig(50, 4, name="item", optimizer=ps.SGD())
    features = [ps.FeatureConfig(user, name="u"), ps.FeatureConfig(item, name="i")]
    message = ps.EmbeddingConfig.from_features(features, 2).to_engine_proto()
    message.table.add(name="item", storage_dtype=TableSettings.BFLOAT16)
    ps.EmbeddingConfig.from_proto(message).save(tmp_path / "c.pbtxt")
    output, result = call(0, "validate", tmp_path / "c.pbtxt")
    assert (
        "memory    at least 192.0 MB over all devices: weights 64.0 MB, slots 128.0 MB; most for 'user', 192.0 MB\n"
    ) in output
    assert result["memory"] == {
        "user": {"weights": 64_000_000, "slots": 128_000_000},
        "item": {"weights": 400, "slots": 0},
    }


def test_validate_puts_its_verdict_last(config, tmp_path, call):
    def verdict(code, *argv):
        return call(code, "validate", *argv)[0].splitlines()[-1]

    good, bad = write(tmp_path / "good.arrows", [frame(0, [1])]), write(tmp_path / "bad.arrows", [frame(0, [77])])
    refused = text(tmp_path / "refused.pbtxt", NO_FORMULA)
    assert verdict(0, config) == verdict(0, config, good) == "verdict   valid"
    assert verdict(3, config, bad, good) == "verdict   not valid: the sources have errors, listed above"
    assert verdict(4, refused) == "verdict   not valid: the configuration has errors, listed above"


def test_validate_prints_warnings_and_exits_with_0(tmp_path, call):
    output, result = call(0, "validate", text(tmp_path / "c.pbtxt", CONFIG.replace("mode: TRAINING", "")))
    assert [(f["code"], f["severity"]) for f in result["findings"]] == [("PS101", "warning")]
    assert "warning   PS101  mode: " in output


def test_validate_counts_a_good_source_and_applies_nothing(config, tmp_path, call):
    log = write(tmp_path / "log.arrows", [frame(0, [1, 2]), frame(1, [3])])
    output, result = call(0, "validate", config, log)
    assert f"good      {log}: 3 rows in 2 frames read\n" in output
    counted = {"rows": 3, "frames": 2, "stale": 0, "stale_rows": 0, "truncated": 0}
    assert result["sources"] == [{"source": str(log), **counted, "bad_rows": {}, "errors": []}]


def test_validate_continues_after_a_bad_source_and_exits_with_3(config, tmp_path, call):
    bad = write(tmp_path / "bad.arrows", [frame(0, [1, 77, 78]), frame(1, [None])])
    good = write(tmp_path / "good.arrows", [frame(0, [1])])
    output, result = call(3, "validate", config, bad, tmp_path / "nowhere.arrows", good)
    assert result["sources"][0]["bad_rows"] == {"id_out_of_range": 2, "id_null": 1}
    assert "2 bad rows; first: " in output
    assert f"{bad}: batch 0, row 1, column 'id': expected 0 <= id < 50" in output
    assert [bool(source["errors"]) for source in result["sources"]] == [True, True, False]


def test_validate_sums_the_rows_of_every_opening_as_a_replay_does(config, tmp_path, call):
    log = write(tmp_path / "log.arrows", [batch([1], [[3e38, 1.0]], step=step) for step in (7, 8, 9)])
    assert call(0, "validate", config, log)[1]["sources"][0]["bad_rows"] == {}
    flags = ("--num-required", "2")
    output, result = call(3, "validate", config, log, *flags)
    assert result["sources"][0]["bad_rows"] == {"sum_not_finite": 1}
    refusal = f"{log}: batch 1, row 0, column 'gradient': expected a sum that is finite as float32"
    assert refusal in output
    with pytest.raises(ps.InputError, match=re.escape(refusal)):
        ps.Engine(ps.EmbeddingConfig.load(config), num_required=2).run(log)
    assert call(0, "validate", config, log, *flags, "--on-bad-row", "drop")[1]["pending"] == 1
    report = ps.Engine(ps.EmbeddingConfig.load(config), num_required=2).run(log, on_bad_row="drop")
    assert (report.dropped, report.pending) == ({"sum_not_finite": 1}, 1)


def test_the_json_of_validate_has_every_error_at_its_top(config, tmp_path, call):
    bad = write(tmp_path / "bad.arrows", [frame(0, [1, 77])])
    good = write(tmp_path / "good.arrows", [frame(0, [1])])
    refused = text(tmp_path / "refused.pbtxt", NO_FORMULA)
    for code, *arguments in ((0, config), (0, config, good), (3, config, good, bad), (4, refused), (3, refused, bad)):
        actual = call(code, "validate", *arguments)[1]
        of_config = [finding["message"] for finding in actual["findings"] if finding["severity"] == "error"]
        of_sources = [error for source in actual["sources"] for error in source["errors"]]
        assert actual["valid"] is (code == 0)
        assert bool(actual["errors"]) is (code != 0)
        assert len(actual["errors"]) == len(of_config) + len(of_sources)
        for error in (*of_config, *of_sources):
            assert any(error in line for line in actual["errors"])


def test_validate_reports_bad_rows_before_a_truncation(config, tmp_path, call):
    cut = write(tmp_path / "cut.arrows", [frame(0, [77])], end=False)
    _, result = call(3, "validate", config, cut)
    assert "no end marker" in result["sources"][0]["errors"][0]
    assert "batch 0, row 0, column 'id'" in result["sources"][0]["errors"][1]
    assert call(3, "validate", config, cut, "--allow-missing-end")[1]["sources"][0]["bad_rows"] == {
        "id_out_of_range": 1
    }


# ---- inspect


def test_inspect_of_a_configuration(config, call):
    output, result = call(0, "inspect", config)
    assert "table user: 50 × 2, Adagrad" in output
    assert (result["kind"], result["mode"], result["tags"]) == ("config", "TRAINING", 0)
    fields = {"optimizer": "Adagrad", "placement": "device"}
    assert result["tables"] == [{"name": "user", "vocabulary_size": 50, "dim": 2, **fields}]


def test_inspect_of_a_configuration_that_cannot_run(tmp_path, call):
    assert "mdl_adagrad_light" in call(0, "inspect", text(tmp_path / "c.pbtxt", NO_FORMULA))[0]


def test_inspect_counts_rows_frames_ids_and_reuse(tmp_path, call):
    log = write(tmp_path / "log.arrows", [frame(3, [5, 9, 5, 5]), frame(3, [9]), frame(4, [7, 5])])
    output, result = call(0, "inspect", log)
    (part,) = result["parts"]
    assert (part["rows"], part["batches"], part["frames"]) == (7, 3, 2)
    assert (part["step_min"], part["step_max"]) == (3, 4)
    assert part["schema"]["id"] == "int64"
    (table,) = part["tables"].values()
    assert (table["rows"], table["distinct"], table["id_min"], table["id_max"]) == (7, 3, 5, 9)
    assert table["reuse"] == 1.75  # 7 rows; {5, 9} in the first frame and {7, 5} in the second
    assert "7 rows in 3 batches, 2 frames, steps 3 to 4" in output
    assert "gradient: fixed_size_list<item: float>[2]" in output


def test_inspect_shows_ids_that_no_table_can_hold(tmp_path, call):
    ids = pa.array([2**64 - 1, None, 4], pa.uint64())
    log = write(tmp_path / "log.arrows", [frame(None, range(3), id=ids)])
    output, result = call(0, "inspect", log)
    table = result["parts"][0]["tables"]["(unnamed)"]
    assert (table["id_min"], table["id_max"], table["distinct"], table["id_nulls"]) == (4, 2**64 - 1, 2, 1)
    assert "3 rows, 1 without an id, ids 4 to 18446744073709551615, 2 distinct" in output


def test_inspect_of_parquet_and_a_directory(tmp_path, call):
    folder = tmp_path / "logs"
    folder.mkdir()
    pa.parquet.write_table(pa.Table.from_batches([frame(0, [1, 2])]), folder / "b.parquet")
    write(folder / "a.arrows", [frame(0, [1])])
    _, result = call(0, "inspect", folder)
    assert [(p["container"], p["rows"]) for p in result["parts"]] == [("Arrow IPC stream", 1), ("Parquet file", 2)]


def test_inspect_of_tables_written_by_out(config, tmp_path, call, capsys):
    log = write(tmp_path / "log.arrows", [frame(0, [1])])
    assert main(["replay", str(config), str(log), "--out", str(tmp_path / "out"), "--json"]) == 0
    capsys.readouterr()
    (part,) = call(0, "inspect", tmp_path / "out")[1]["parts"]
    assert (part["name"], part["rows"]) == (str(tmp_path / "out" / "user.parquet"), 50)
    assert list(part["schema"]) == ["id", "row", "accumulators"]
    assert part["holds"] == "table"
    assert main(["replay", str(config), str(log), "--deltas", str(tmp_path / "d"), "--json"]) == 0
    capsys.readouterr()
    output, result = call(0, "inspect", tmp_path / "d")
    assert result["parts"][0]["holds"] == "deltas"
    assert "not a row stream" not in output


def test_inspect_writes_no_page_of_what_is_no_stream_and_none_over_a_file(config, tmp_path, capsys):
    assert main(["inspect", str(config), "--report", str(tmp_path / "page")]) == 2
    assert "pages are of gradient streams" in capsys.readouterr().err
    log = write(tmp_path / "log.arrows", [frame(0, [1])])
    assert main(["inspect", str(log), "--report", str(log)]) == 6
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)


def test_inspect_of_rows_without_gradients_says_why_it_counts_no_ids(tmp_path, call):
    log = write(tmp_path / "log.arrows", [pa.RecordBatch.from_pydict({"id": [1, 2]})])
    output, result = call(0, "inspect", log)
    assert "not a row stream: no column for the role 'gradient'" in output
    assert result["parts"][0]["rows"] == 2


@pytest.mark.parametrize("content", [b"Dear diary,\n", b"\0\1\2\3 junk", b"", b"\xff\xff\xff\xff", b"PAR1", b"ARROW1"])
def test_inspect_of_anything_else_is_exit_3_in_one_line(content, tmp_path, capsys):
    path = tmp_path / "thing"
    path.write_bytes(content)
    assert main(["inspect", str(path), "--json"]) == 3
    output = capsys.readouterr()
    assert json.loads(output.out)["exit_code"] == 3
    assert output.err.startswith(f"penstock: {path}: ")
    assert output.err.count("\n") == 1


# ---- demo


def test_demo_checks_its_answer_and_says_where_the_files_are(tmp_path, capsys):
    folder = tmp_path / "d"
    assert main(["demo", "--dir", str(folder)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "frames    61: 20 steps, 1 stale\n" in output.out
    assert "input     verified: every checksum fits\n" in output.out
    assert "every row of both tables against a plain NumPy loop: agrees" in output.out
    for name in ("tables.pbtxt", "log.arrows", "tables/user.parquet", "tables/item.parquet"):
        assert str(folder / name) in output.out
        assert (folder / name).is_file()


def test_the_command_that_demo_shows_gives_its_tables(tmp_path, capsys):
    folder = tmp_path / "d"
    assert main(["demo", "--dir", str(folder), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["passed"] is True
    before = pa.parquet.read_table(folder / "tables" / "item.parquet")
    (shown,) = [line for line in output.err.splitlines() if line.startswith("$ penstock ")]
    assert main(shown.split()[2:]) == 0
    assert pa.parquet.read_table(folder / "tables" / "item.parquet").equals(before)


@pytest.mark.parametrize(("rate", "wrong"), [("USER_RATE", "user"), ("ITEM_RATE", "item")])
def test_demo_finds_a_wrong_answer(rate, wrong, tmp_path, capsys, monkeypatch):
    write_config = penstock.cli.demo.write_config

    def another_rate(path):
        with monkeypatch.context() as changed:
            changed.setattr(penstock.cli.demo, rate, getattr(penstock.cli.demo, rate) * 1.001)
            write_config(path)

    monkeypatch.setattr(penstock.cli.demo, "write_config", another_rate)
    assert main(["demo", "--dir", str(tmp_path), "--json"]) == 1
    output = capsys.readouterr()
    checks = json.loads(output.out)["checks"]
    assert [name for name, good in checks.items() if not good] == [wrong]
    assert f"DIFFERS in {wrong}" in output.err
