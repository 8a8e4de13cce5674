"""The columns next to id and gradient: table, step, contributor, learning rates; and how columns are found."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from columns import (
    FLOATS,
    INTEGERS,
    LISTS,
    SIZES,
    TEXTS,
    TWO,
    VIEWS,
    batch_of,
    error_of,
    frames_of,
    gradients,
    place_of,
    rows_of,
)

import penstock as ps
from penstock.base.errors import ConfigError, UsageError
from penstock.io.decoding.reader import ReadOptions

# ---- table


@pytest.mark.parametrize("kind", TEXTS, ids=str)
def test_the_table_column_of_any_text_type(kind):
    batch = batch_of(
        4,
        gradient=pa.array([[1, 1], [2] * 3, [3] * 3, [4, 4]], pa.list_(pa.float32())),
        table=pa.array(["user", "item", "item", "user"]).cast(kind),
    )
    wanted = {"user": [(0, [1, 1]), (3, [4, 4])], "item": [(1, [2] * 3), (2, [3] * 3)]}
    assert rows_of(frames_of([batch], TWO)[0]) == wanted
    assert rows_of(frames_of([batch.slice(1, 2)], TWO)[0]) == {"item": wanted["item"]}


def test_dictionaries_with_unused_duplicate_and_null_entries():
    dictionary = pa.array(["absent", "user", None, "user", "item"])
    same = {"user": (100, 2), "item": (100, 2)}
    indices = pa.array([1, 3, 4, 1], pa.int8())
    batch = batch_of(4, table=pa.DictionaryArray.from_arrays(indices, dictionary))
    assert {t: [i for i, _ in rows] for t, rows in rows_of(frames_of([batch], same)[0]).items()} == {
        "user": [0, 1, 3],
        "item": [2],
    }
    for bad, name in ((0, "'absent'"), (2, "null"), (None, "null")):
        indices = pa.array([1, 4, bad], pa.int8())
        error = error_of([batch_of(3, table=pa.DictionaryArray.from_arrays(indices, dictionary))], same)
        assert place_of(error) == (0, 2, "table", "unknown_table")
        assert f"expected a table of the configuration (user, item), got {name}" in str(error)


def test_a_dictionary_of_string_views():
    column = pa.DictionaryArray.from_arrays(pa.array([2, 1], pa.int8()), pa.array(VIEWS, pa.string_view()))
    batch = batch_of(2, table=column, step=pa.array([1, 1]), contributor=column)
    assert [(f.contributor, list(f.rows)) for f in frames_of([batch], {"user": (9, 2), "item": (9, 2)})] == [
        ("item", ["item"]),
        ("user", ["user"]),
    ]


def test_a_dictionary_far_larger_than_its_batches_is_only_looked_at_where_used():
    many = pa.array([f"worker{i}" for i in range(300_000)])
    indices = pa.array([299_999, None, 5, 5], pa.int32())
    batch = batch_of(4, step=pa.array([1] * 4), contributor=pa.DictionaryArray.from_arrays(indices, many))
    assert [f.contributor for f in frames_of([batch])] == ["worker299999", None, "worker5"]


def test_without_a_table_column_the_metadata_then_the_option_then_the_only_table_counts():
    same = {"user": (100, 2), "item": (100, 2)}
    labelled = batch_of().replace_schema_metadata({"penstock.table": "item"})
    assert list(frames_of([labelled], same, table="user")[0].rows) == ["item"]
    assert list(frames_of([batch_of()], same, table="user")[0].rows) == ["user"]
    assert list(frames_of([batch_of()])[0].rows) == ["user"]
    problem = str(error_of([batch_of(Table=pa.array(["user"] * 2))], same))
    assert "the configuration has several tables (user, item), so rows need 'table', or --table" in problem
    assert problem.endswith("; try --column table=Table")
    error = error_of([batch_of().replace_schema_metadata({"penstock.table": "usr"})])
    assert place_of(error) == (0, 0, None, "unknown_table")
    assert "got 'usr' from the schema's metadata, penstock.table; did you mean 'user'?" in str(error)


# ---- step and contributor


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_steps_of_any_integer_type(kind):
    assert [f.local_step for f in frames_of([batch_of(3, step=pa.array([4, 5, 5], kind))])] == [4, 5]


@pytest.mark.parametrize(
    "column",
    [pa.array(["a", None, "b", "b"]).cast(kind) for kind in TEXTS]
    + [pa.array(["a", None, "b", "b"]).dictionary_encode("encode")],
    ids=lambda c: str(c.type),
)
def test_contributors_of_any_text_type_or_null(column):
    frames = frames_of([batch_of(4, step=pa.array([1] * 4), contributor=column)])
    assert [(f.contributor, f.num_rows) for f in frames] == [("a", 1), (None, 1), ("b", 2)]


def test_bytes_under_a_null_string_view_are_never_read():
    names = pa.array(["a name too long to stand inline", None, "b", None], pa.string_view())
    validity, views, texts = names.buffers()
    garbage = np.frombuffer(views, np.uint8).copy()
    garbage[16:32] = garbage[48:64] = 0x7F
    names = pa.Array.from_buffers(names.type, 4, [validity, pa.py_buffer(garbage), texts])
    batch = batch_of(4, step=pa.array([1] * 4), contributor=names)
    wanted = ["a name too long to stand inline", None, "b", None]
    assert [f.contributor for f in frames_of([batch])] == wanted
    assert [f.contributor for f in frames_of([batch.slice(1, 2)])] == wanted[1:3]


@pytest.mark.parametrize("kind", [*INTEGERS, "dictionary"], ids=str)
def test_contributors_of_any_integer_type(kind):
    values = pa.array([7, 7, None, 3], pa.int32())
    column = values.dictionary_encode() if kind == "dictionary" else values.cast(kind)
    frames = frames_of([batch_of(4, step=pa.array([1] * 4), contributor=column)])
    assert [(f.contributor, f.num_rows) for f in frames] == [(7, 2), (None, 1), (3, 1)]


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
def test_a_null_step_is_an_error_that_no_option_drops(row, on_bad_row):
    steps = pa.array([None if n == row else 1 for n in range(4)])
    error = error_of([batch_of(4, step=steps, contributor=steps)], on_bad_row=on_bad_row)
    assert place_of(error) == (0, row, "step", None)
    assert "expected a step, got null" in str(error)


def test_a_step_beyond_int64_is_an_error():
    error = error_of([batch_of(2, step=pa.array([1, 2**63], pa.uint64()))])
    assert place_of(error) == (0, 1, "step", None)
    assert f"expected an int64, got {2**63}" in str(error)


# ---- learning rates


@pytest.mark.parametrize("value", FLOATS, ids=str)
@pytest.mark.parametrize("make", LISTS[:3], ids=["fixed", "list", "large"])
def test_learning_rates_of_any_float_list(make, value):
    column = pa.array([[0.5, 0.25]] * 3, make(value))
    batch = batch_of(3, learning_rates=column).slice(1)
    assert [f.learning_rates for f in frames_of([batch], num_tags=2)] == [(0.5, 0.25)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "expected 2 learning rates, one per tag, got null"),
        ([0.5, None], "expected 2 learning rates, one per tag, got null"),
        ([0.5], "expected 2 learning rates, one per tag, got 1"),
        ([0.5, math.nan], r"expected finite learning rates, got [0.5, nan]"),
    ],
    ids=str,
)
def test_a_missing_learning_rate_is_an_error_with_its_place(bad, message):
    column = pa.array([[0.5, 0.25], bad], pa.list_(pa.float32()))
    error = error_of([batch_of(learning_rates=column)], num_tags=2)
    assert place_of(error) == (0, 1, "learning_rates", None)
    assert message in str(error)


def test_missing_learning_rates_are_an_error_before_the_first_row():
    with pytest.raises(ConfigError, match=r"the value of tag 0: add --learning-rate 0=VALUE"):
        frames_of([batch_of()], num_tags=1, rates_needed=(0,))


# ---- names


def test_column_order_and_extra_columns_do_not_matter():
    extra = pa.array([{"a": None}, {"a": 1}])
    batch = pa.RecordBatch.from_pydict(
        {"zzz": extra, "gradient": gradients([[1, 2], [3, 4]]), "id": pa.array([5, 6]), "more": pa.nulls(2)}
    )
    assert rows_of(frames_of([batch])[0]) == {"user": [(5, [1, 2]), (6, [3, 4])]}


def test_columns_are_mapped_to_roles_by_name_and_one_may_have_two():
    batch = pa.RecordBatch.from_pydict({"key": pa.array([5, 5]), "grad": gradients([[1, 2], [3, 4]])})
    (frame,) = frames_of([batch], columns={"id": "key", "gradient": "grad", "step": "key"})
    assert rows_of(frame) == {"user": [(5, [1, 2]), (5, [3, 4])]}
    assert frame.local_step == 5
    assert error_of([batch], columns={"id": "key", "gradient": "grad", "table": "nope"}).column is None


@pytest.mark.parametrize(
    ("name", "role"), [("grad", "gradient"), ("Gradients", "gradient"), ("ID", "id"), ("ids", "id")]
)
def test_a_misspelt_column_suggests_its_role(name, role):
    batch = batch_of(**{role: None, name: batch_of()[role]})
    problem = str(error_of([batch]))
    assert f"no column for the role '{role}' (the stream has: " in problem
    assert problem.endswith(f"; try --column {role}={name}")


@pytest.mark.parametrize(
    "bad", [{"merge": "time"}, {"on_bad_row": "skip"}, {"gradient_dtype": "int8"}, {"contribution_rows": 0}], ids=str
)
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(UsageError, match=f"{next(iter(bad))}: expected"):
        ReadOptions(SIZES, **bad)


def test_a_tensor_whose_values_are_in_another_order_than_its_axes_is_refused(tmp_path):
    def tensors(permutation):
        kind = pa.fixed_shape_tensor(pa.float32(), [2, 3], permutation=permutation)
        storage = pa.FixedSizeListArray.from_arrays(pa.array(range(6), pa.float32()), 6)
        return pa.ExtensionArray.from_storage(kind, storage)

    table = ps.TableConfig(4, 6, ps.Constant(0.0), ps.SGD(1.0), combiner="sum", name="t")
    engine = ps.Engine(ps.EmbeddingConfig.from_features({"f": ps.FeatureConfig(table, name="f")}, batch_size=1))
    permuted, straight = tensors([1, 0]), tensors([0, 1])
    message = "got extension<arrow.fixed_shape_tensor.*permutation=.1,0.*; store its values in the order of its axes"
    with pytest.raises(ps.InputError, match=f"column 'gradient': expected .*{message}"):
        engine.run(pa.table({"step": [0], "id": [1], "gradient": permuted}))
    with pytest.raises(ps.InputError, match=message):
        engine.apply({"t": ([1], permuted)})
    struct = pa.StructArray.from_arrays([pa.array([[1]]), permuted], names=["ids", "gradient"])
    with pytest.raises(ps.InputError, match=r"expected a list of floats in 'gradient', got .*permutation=\[1,0\]"):
        engine.run(pa.table({"step": [0], "f": struct}))
    pq.write_table(pa.table({"id": [1], "row": permuted}), tmp_path / "t.parquet")
    with pytest.raises(ps.InputError, match=r"expected a list of 6 floats, got .*permutation=\[1,0\]"):
        engine.read_tables(tmp_path)
    assert not engine.lookup("t", range(4)).any()
    engine.run(pa.table({"step": [0], "id": [1], "gradient": straight}))
    assert engine.lookup("t", [1]).tolist() == [[0, -1, -2, -3, -4, -5]]


@pytest.mark.parametrize(
    ("name", "kind", "way"),
    [
        ("step", pa.dictionary(pa.int8(), pa.int64()), "cast it to int64 first, a category of pandas with astype"),
        ("id", pa.dictionary(pa.int8(), pa.int64()), "cast it to int64 first"),
        ("gradient", pa.list_view(pa.float32()), "cast it to list<float> first"),
    ],
)
def test_columns_that_can_be_cast_are_refused_with_the_cast(name, kind, way):
    values = {"step": [0], "id": [1], "gradient": [[1.0, 2.0]]}
    types = {"step": pa.int64(), "id": pa.int64(), "gradient": pa.list_(pa.float32())} | {name: kind}
    rows = pa.table({column: pa.array(values[column], types[column]) for column in values})
    table = ps.TableConfig(8, 2, optimizer=ps.SGD(0.1), name="user")
    with pytest.raises(ps.InputError, match=f"column '{name}': expected .*; {way}"):
        ps.Engine(ps.EmbeddingConfig.from_tables([table])).run(rows)
