"""``export``, ``diff`` and ``inspect``: what a checkpoint holds, out of it and compared."""

import re

import numpy as np
import pyarrow.parquet
import pytest
from batches import batch
from checkpoints import LOG, ROWS, engine_of
from cli import outcome
from ipc import write

import penstock as ps


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with a delta, and the engine that it is of."""
    engine = engine_of()
    engine.run(iter(LOG[:10]), checkpoint=tmp_path / "c", every=1)
    return tmp_path / "c", engine


def test_export_writes_the_tables_of_out(saved, tmp_path, capsys):
    folder, engine = saved
    code, result, _ = outcome(capsys, "export", folder, tmp_path / "exported")
    assert (code, result["global_step"]) == (0, 3)
    for path in engine.write_tables(tmp_path / "written"):
        table = pyarrow.parquet.read_table(tmp_path / "exported" / path.name)
        assert table.equals(pyarrow.parquet.read_table(path), check_metadata=True)


def test_diff_of_equal_states_in_checkpoint_and_tables_is_empty(saved, tmp_path, capsys):
    folder, engine = saved
    engine.save(tmp_path / "again")
    engine.write_tables(tmp_path / "out")
    for other in ("again", "out"):
        assert outcome(capsys, "diff", folder, tmp_path / other)[:2] == (0, {"equal": True, "differences": {}})


def test_diff_shows_the_first_and_the_largest_difference(saved, tmp_path, capsys):
    folder, engine = saved
    rows = engine.retrieve_parameters("item")["parameters"]
    rows[7, 1], rows[900, 0], rows[1200, 1] = -0.0, 50.0, np.nan
    engine.load_parameters("item", rows)
    engine.save(tmp_path / "other")
    code, result, err = outcome(capsys, "diff", folder, tmp_path / "other")
    different = result["differences"]["item"]["parameters"]
    assert (code, different["rows"]) == (1, 3)
    assert (different["first"]["id"], different["first"]["b"]) == (7, "-0.0")
    assert (different["largest"]["id"], different["largest"]["b"]) == (1200, "nan")
    assert "table item, parameters: 3 rows differ\n  first    id 7, column 1: " in err
    assert list(result["differences"]) == ["item"]


def test_diff_lists_missing_tables_and_slots(saved, tmp_path, capsys):
    folder, _ = saved
    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(ROWS, 4, name="user")], ps.SGD(0.1))
    ps.Engine(config).save(tmp_path / "other")
    code, result, _ = outcome(capsys, "diff", folder, tmp_path / "other")
    assert code == 1
    assert result["differences"]["global_step"] == [3, 0]
    assert result["differences"]["item"] == {"missing_in": str(tmp_path / "other")}
    assert result["differences"]["user"]["accumulators"] == {"missing_in": "B"}


def test_inspect_says_what_a_checkpoint_holds(saved, capsys):
    folder, _ = saved
    code, result, err = outcome(capsys, "inspect", folder)
    assert (code, result["kind"], result["global_step"], result["pending"]) == (0, "checkpoint", 3, 1)
    assert result["sources"] == [{"source": "<batches>", "frames": 10}]
    assert f"table user: {ROWS:,} × 4, Adagrad, accumulators" in err
    assert re.search(rf"  1 base, \d+ deltas?, {result['bytes']:,} bytes", err)
    (folder / "00000001.base").write_bytes(b"")
    assert outcome(capsys, "inspect", folder)[0] == 5


@pytest.mark.parametrize("words", [["export", "{}", "out"], ["diff", "{}", "{}"]])
def test_a_missing_checkpoint_is_exit_5(words, tmp_path, capsys):
    code, result, _ = outcome(capsys, *(word.format(tmp_path / "nothing") for word in words))
    assert (code, "no such checkpoint" in result["error"]) == (5, True)


@pytest.fixture
def many(tmp_path):
    """A configuration of 23 tables, and a log in which the tables of high number have the most rows."""
    tables = [ps.TableConfig(50, 2, name=f"t{n:02}") for n in range(23)]
    ps.EmbeddingConfig.from_tables(tables, optimizer=ps.SGD(0.1)).save(tmp_path / "many.pbtxt")
    names = [f"t{n:02}" for n in range(23) for _ in range(n + 1)]
    rows = batch([n % 50 for n in range(len(names))], table=names)
    return tmp_path / "many.pbtxt", write(tmp_path / "many.arrows", [rows])


def tables_in(output, first):
    return [line for line in output.splitlines() if line.startswith(first)]


def test_people_see_ten_tables_at_most_and_how_many_more_there_are(many, tmp_path, capsys):
    config, log = many
    code, report, output = outcome(
        capsys, "replay", config, log, "--out", tmp_path / "a", "--checkpoint", tmp_path / "c"
    )
    assert code == 0
    shown = tables_in(output, "table ")
    assert [line.split()[1] for line in shown] == [*(f"t{n}:" for n in range(22, 12, -1)), "…"]  # those with most rows
    assert shown[-1] == "table     … 13 more"
    assert tables_in(output, "wrote ")[9:] == [f"wrote     {tmp_path / 'a' / 't09.parquet'}", "wrote     … 13 more"]
    assert (len(report["tables"]), len(report["out"])) == (23, 23)

    for path in (config, tmp_path / "c"):
        _, result, output = outcome(capsys, "inspect", path)
        assert tables_in(output, "  table ")[9].startswith("  table t09: ")
        assert tables_in(output, "  table ")[10:] == ["  table … 13 more"]
        assert len(result["tables"]) == 23
    _, result, output = outcome(capsys, "inspect", log)
    assert tables_in(output, "  table ")[10:] == ["  table … 13 more"]
    assert len(result["parts"][0]["tables"]) == 23

    _, result, output = outcome(capsys, "export", tmp_path / "c", tmp_path / "e")
    assert tables_in(output, "wrote ")[10:] == ["wrote     … 13 more"]
    assert len(result["out"]) == 23

    assert outcome(capsys, "replay", config, log, "--out", tmp_path / "b", "--seed", 1)[0] == 0
    code, result, output = outcome(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert (code, len(result["differences"])) == (1, 23)
    assert len(tables_in(output, "table t")) == 10
    assert tables_in(output, "table …") == ["table … 13 more"]


def test_an_error_names_ten_tables_at_most(many, capsys):
    config, log = many
    code, result, _ = outcome(capsys, "replay", config, log, "--table", "t5")
    assert code == 2
    assert "t08, t09, … 13 more)" in result["error"]


def test_files_that_are_symbolic_links_stay_and_their_targets_are_replaced(saved, tmp_path, capsys):
    folder, engine = saved
    stored, exported = tmp_path / "stored", tmp_path / "exported"
    stored.mkdir()
    exported.mkdir()
    (exported / "user.parquet").symlink_to("../stored/rows")
    for _ in range(2):
        assert outcome(capsys, "export", folder, exported)[0] == 0
    assert (exported / "user.parquet").is_symlink()
    assert sorted(file.name for file in stored.iterdir()) == ["rows"]
    assert pyarrow.parquet.read_table(stored / "rows").num_rows == ROWS
    assert engine.write_tables(exported)[0] == exported / "user.parquet"


@pytest.mark.parametrize("output", ["deltas", "on_bad_row"])
def test_deltas_and_bad_rows_do_not_replace_a_symbolic_link(tmp_path, output):
    (tmp_path / "link").symlink_to("target")
    name = str(tmp_path / "link")
    with pytest.raises(ps.UsageError, match="link: exists; it is never written over"):
        engine_of().run(iter(LOG), **{output: name if output == "deltas" else f"quarantine={name}"})
    assert [file.name for file in tmp_path.iterdir()] == ["link"]
