"""The error for roles that no column plays: all of them at once, with a command that works."""

import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli import error_line, outcome

import penstock as ps

ROWS = 60


def rows(ids="id", gradient="gradient", step="step", table="table", **others):
    """A log of two tables, under other names."""
    random = np.random.default_rng(1)
    columns = {
        ids: random.integers(0, 50, ROWS),
        gradient: pa.array(random.normal(size=(ROWS, 2)).astype(np.float32).tolist(), pa.list_(pa.float32(), 2)),
        step: np.arange(ROWS) // 10,
        table: np.where(random.integers(0, 2, ROWS), "user", "item"),
        **others,
    }
    return pa.table(columns)


def config():
    tables = [ps.TableConfig(50, 2, optimizer=ps.SGD(0.1), name=name) for name in ("user", "item")]
    return ps.EmbeddingConfig.from_tables(tables)


def problem_of(source, **options):
    with pytest.raises(ps.InputError) as caught:
        ps.Engine(config()).run(source, **options)
    return str(caught.value)


def flags_of(problem):
    """The columns that an error proposes."""
    words = problem.rpartition("; try ")[2].split()
    assert set(words[::2]) == {"--column"}
    return dict(word.split("=", 1) for word in words[1::2])


@pytest.mark.parametrize(
    "names",
    [
        {"ids": "key", "gradient": "grad", "step": "batch", "table": "feature"},
        {"ids": "itemId", "gradient": "dy", "step": "global_step", "table": "field"},
        {"ids": "c0", "gradient": "c1", "step": "c2", "table": "c3"},  # by their types and values alone
        {"ids": "Id", "gradient": "Gradients", "step": "Steps", "table": "Tables"},
    ],
)
def test_every_missing_role_is_reported_at_once_with_columns_that_work(tmp_path, names):
    pq.write_table(rows(**names), tmp_path / "log.parquet")
    problem = problem_of(tmp_path / "log.parquet")
    assert "no column for the roles 'id', 'gradient', 'step' and 'table' (the stream has: " in problem
    columns = flags_of(problem)
    assert columns == {role.replace("ids", "id"): name for role, name in names.items()}
    wanted, engine = ps.Engine(config()), ps.Engine(config())
    wanted.run(rows())
    engine.run(tmp_path / "log.parquet", columns=columns)
    assert engine.state_hash() == wanted.state_hash()


def test_a_new_user_with_four_unhelpful_names_needs_two_tries(tmp_path, capsys):
    pq.write_table(rows("a", "b", "c", "d"), tmp_path / "log.parquet")
    config().save(tmp_path / "tables.pbtxt")
    command = ("replay", tmp_path / "tables.pbtxt", tmp_path / "log.parquet")
    flags = error_line(capsys, 3, *command).strip().rpartition("; try ")[2].split()
    code, report, _ = outcome(capsys, *command, *flags)
    assert (code, report["rows"], report["steps"]) == (0, ROWS, 6)


def test_where_rows_name_no_table_the_column_whose_values_are_tables_is_proposed():
    problem = problem_of(rows(table="kind", note=["x"] * ROWS))
    assert problem.endswith("so rows need 'table', or --table; try --column table=kind")
    assert "try" not in problem_of(rows(table="kind").drop_columns(["kind"]))


def test_a_given_column_is_no_guess_and_a_wrong_name_is_reported_alone():
    problem = problem_of(rows(ids="key", step="batch"), columns={"step": "batch"})
    assert flags_of(problem) == {"id": "key"}
    assert "no column 'bach' for the role 'step'; did you mean --column step=batch?" in problem_of(
        rows(step="batch"), columns={"step": "bach"}
    )


def test_columns_that_are_not_read_are_named_once(caplog):
    with caplog.at_level(logging.WARNING, "penstock"):
        report = ps.Engine(config()).run(rows(note=["x"] * ROWS, weight=np.ones(ROWS)))
    assert report.notes == ("columns that were not read: note, weight",)
    assert [record.getMessage() for record in caplog.records] == list(report.notes)
    assert ps.Engine(config()).run(rows()).notes == ()


def test_large_frames_without_a_step_are_doubted_if_a_column_of_integers_is_not_read():
    table = ps.EmbeddingConfig.from_tables([ps.TableConfig(50, 1, optimizer=ps.SGD(0.1), name="user")])
    many = 70_000
    gradient = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(many, np.float32)), 1)
    batch = pa.RecordBatch.from_pydict({"id": np.zeros(many, int), "gradient": gradient, "minibatch": np.arange(many)})
    doubt = "frames of more than 65,536 rows have no step, and column 'minibatch' is not read"
    assert any(note.startswith(doubt) for note in ps.Engine(table).run([batch]).notes)
    assert not any(note.startswith(doubt) for note in ps.Engine(table).run([batch.slice(0, 65_536)]).notes)


def test_values_of_damaged_columns_are_not_guessed_from():
    """A string ends far behind the buffer, as in a damaged file."""
    table = rows(ids="key", table="feature")
    names = table["feature"].combine_chunks()
    ends = np.frombuffer(names.buffers()[1], np.int32)[: ROWS + 1].copy()
    ends[5] = 1 << 30
    broken = pa.Array.from_buffers(pa.string(), ROWS, [None, pa.py_buffer(ends), names.buffers()[2]])
    [batch] = table.set_column(table.schema.get_field_index("feature"), "feature", broken).to_batches()
    problem = problem_of([batch])
    assert "no column for the roles 'id' and 'table'" in problem
    assert flags_of(problem) == {"id": "key", "table": "feature"}  # by its type
    with pytest.raises(ps.InputError, match="hash_ids: expected strings"):
        ps.hash_ids(broken)
