"""Every column type of a row stream, and what is said of every bad row, against a slow reading in plain Python."""

import io
import math

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, InputError, UsageError
from penstock.io.arrays import one_frame
from penstock.io.reader import FrameReader, ReadOptions

SIZES = {"user": (100, 2)}
TWO = {"user": (100, 2), "item": (50, 3)}
INTEGERS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]
TEXTS = [pa.utf8(), pa.large_utf8(), pa.string_view(), pa.dictionary(pa.int8(), pa.utf8())]
TEXTS += [pa.dictionary(pa.uint64(), pa.large_utf8())]
VIEWS = [None, "user", "item", "other", None, "more", "and one that is too long to stand inline"]


def gradients(rows, kind=None):
    return pa.array(rows, kind or pa.list_(pa.float32(), 2))


def batch_of(num_rows=2, **columns):
    columns = {"id": pa.array(range(num_rows)), "gradient": gradients([[1.0, 2.0]] * num_rows)} | columns
    return pa.RecordBatch.from_pydict({n: c for n, c in columns.items() if c is not None})


def frames_of(source, sizes=SIZES, **options):
    return list(FrameReader(source, ReadOptions(sizes, **options)))


def rows_of(frame):
    """table → [(id, gradient row), …] in arrival order."""
    return {
        table: [
            (int(i), g.tolist()) for block in blocks for row, i in enumerate(block.ids) for g in [block.gradient(row)]
        ]
        for table, blocks in frame.rows.items()
    }


def error_of(source, sizes=SIZES, **options):
    with pytest.raises(InputError) as caught:
        frames_of(source, sizes, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def place_of(error):
    return error.batch, error.row, error.column, error.reason


# ---- id


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_ids_of_any_integer_type(kind):
    (frame,) = frames_of([batch_of(3, id=pa.array([0, 99, 7], kind))])
    (block,) = frame.rows["user"]
    assert block.ids.dtype == np.int64
    assert block.ids.tolist() == [0, 99, 7]


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_an_id_outside_the_vocabulary_is_told_with_its_place(kind):
    good, bad = (batch_of(3, id=pa.array([0, 99, last], kind)) for last in (7, 100))
    error = error_of([good, bad])
    assert place_of(error) == (1, 2, "id", "id_out_of_range")
    assert "expected 0 <= id < 100 (vocabulary_size of table 'user'), got 100" in str(error)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(pa.int8(), -1), (pa.int64(), -(2**63)), (pa.int64(), 2**63 - 1), (pa.uint64(), 2**63), (pa.uint64(), 2**64 - 1)],
    ids=str,
)
def test_ids_are_never_wrapped(kind, value):
    error = error_of([batch_of(2, id=pa.array([3, value], kind))])
    assert place_of(error) == (0, 1, "id", "id_out_of_range")
    assert f"got {value}" in str(error)


def test_a_null_id_is_told_before_what_its_value_would_be():
    error = error_of([batch_of(2, id=pa.array([1, None]))])
    assert place_of(error) == (0, 1, "id", "id_null")


@pytest.mark.parametrize("kind", [pa.float64(), pa.bool_(), pa.utf8(), pa.decimal128(5, 0), pa.null()], ids=str)
def test_ids_of_other_types_are_refused_by_name_and_type(kind):
    error = error_of([batch_of(1, id=pa.nulls(1, kind))])
    assert f"column 'id': expected any integer type, got {kind}" in str(error)


# ---- gradient

FLOATS = [pa.float16(), pa.float32(), pa.float64()]
LISTS = [lambda v: pa.list_(v, 2), pa.list_, pa.large_list, lambda v: pa.fixed_shape_tensor(v, [2])]
VALUES = [[0.5, -2.0], [-0.0, 1.0], [3.0, 4.0]]


def array_of(rows, kind):
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.array(rows, kind.storage_type))
    return pa.array(rows, kind)


@pytest.mark.parametrize("value", FLOATS, ids=str)
@pytest.mark.parametrize("make", LISTS, ids=["fixed", "list", "large", "tensor"])
def test_gradients_of_any_float_and_list_type(make, value):
    column = array_of(VALUES, make(value))
    for start in range(3):
        (frame,) = frames_of([batch_of(3, gradient=column).slice(start)])
        (block,) = frame.rows["user"]
        assert block.grads.dtype == np.float32
        assert block.grads.tolist() == VALUES[start:]
        assert block.ids.tolist() == list(range(start, 3))
        assert np.signbit(block.grads.ravel()).tolist() == [math.copysign(1, v) < 0 for r in VALUES[start:] for v in r]


@pytest.mark.parametrize("make", LISTS[:3], ids=["fixed", "list", "large"])
def test_bfloat16_declared_by_the_fields_metadata(make):
    halves = [[0x3F80, 0xC000], [0x0001, 0x7F7F]]  # 1, -2; the smallest and the largest
    wanted = [[1.0, -2.0], [2.0**-133, float.fromhex("0x1.fep127")]]
    kind = make(pa.uint16())
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("gradient", kind, metadata={"dtype": "bfloat16"})])
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2]), pa.array(halves, kind)], schema=schema)
    assert rows_of(frames_of([batch])[0]) == {"user": [(1, wanted[0]), (2, wanted[1])]}


def test_bfloat16_declared_by_the_value_fields_metadata_or_by_option():
    inner = pa.field("item", pa.uint16(), metadata={"dtype": "bfloat16"})
    declared = batch_of(1, gradient=pa.array([[0x3F80, 0x4000]], pa.list_(inner, 2)))
    plain = batch_of(1, gradient=pa.array([[0x3F80, 0x4000]], pa.list_(pa.uint16(), 2)))
    assert rows_of(frames_of([declared])[0]) == {"user": [(0, [1.0, 2.0])]}
    assert rows_of(frames_of([plain], gradient_dtype="bfloat16")[0]) == {"user": [(0, [1.0, 2.0])]}
    assert "got fixed_size_list<item: uint16>[2]" in str(error_of([plain]))


def test_metadata_that_says_bfloat16_means_nothing_on_floats():
    schema = batch_of(1).schema
    schema = schema.set(1, schema.field(1).with_metadata({"dtype": "bfloat16"}))
    assert rows_of(frames_of([batch_of(1).cast(schema)])[0]) == {"user": [(0, [1.0, 2.0])]}


@pytest.mark.parametrize(("said", "message"), [("float64", "lists of float64"), ("bfloat16", "declared as bfloat16")])
def test_a_gradient_dtype_that_is_not_the_columns_is_an_error(said, message):
    assert message in str(error_of([batch_of()], gradient_dtype=said))
    assert frames_of([batch_of()], gradient_dtype="float32")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
@pytest.mark.parametrize("make", LISTS, ids=["fixed", "list", "large", "tensor"])
def test_values_not_finite_as_float32_are_told_with_row_and_position(make, bad):
    error = error_of([batch_of(3, gradient=array_of([[1.0, 2.0], [3.0, bad], [bad, 1.0]], make(pa.float64())))])
    assert place_of(error) == (0, 1, "gradient", "gradient_not_finite")
    assert "at position 1" in str(error)


@pytest.mark.parametrize("bits", [0x7FF0000000000001, 0xFFF0000000000001], ids=hex)
def test_a_signalling_nan_is_a_bad_row_and_not_a_warning(bits):
    flat = pa.array(np.array([1, 2, bits, 1], np.uint64).view(np.float64))
    error = error_of([batch_of(2, gradient=pa.FixedSizeListArray.from_arrays(flat, 2))])
    assert place_of(error) == (0, 1, "gradient", "gradient_not_finite")


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0], ids=hex)
def test_bfloat16_that_is_not_finite(bits):
    column = pa.array([[0x3F80, bits]], pa.list_(pa.uint16(), 2))
    error = error_of([batch_of(1, gradient=column)], gradient_dtype="bfloat16")
    assert error.reason == "gradient_not_finite"


@pytest.mark.parametrize("make", LISTS, ids=["fixed", "list", "large", "tensor"])
def test_null_rows_and_nulls_inside_are_told(make):
    for bad in (None, [1.0, None]):
        batch = batch_of(3, gradient=array_of([[1.0, 1.0], [2.0, 2.0], bad], make(pa.float32())))
        assert place_of(error_of([batch])) == (0, 2, "gradient", "gradient_null")
        assert place_of(error_of([batch.slice(2)])) == (0, 0, "gradient", "gradient_null")
        assert len(frames_of([batch.slice(0, 2)])) == 1


@pytest.mark.parametrize("rows", [[[1.0]], [[1.0, 2.0, 3.0]], [[]], [[1.0, 2.0], [1.0]]], ids=str)
def test_a_length_other_than_the_tables_dim_is_told(rows):
    for kind in (pa.list_(pa.float32()), pa.large_list(pa.float64())):
        error = error_of([batch_of(len(rows), gradient=pa.array(rows, kind))])
        assert place_of(error) == (0, len(rows) - 1, "gradient", "length_mismatch")
        assert f"expected 2 floats (dim of table 'user'), got {len(rows[-1])}" in str(error)


@pytest.mark.parametrize("width", [0, 1, 3])
def test_a_fixed_size_other_than_the_tables_dim_is_told(width):
    error = error_of([batch_of(2, gradient=pa.array([[1.0] * width] * 2, pa.list_(pa.float32(), width)))])
    assert place_of(error) == (0, 0, "gradient", "length_mismatch")


@pytest.mark.parametrize("kind", [pa.float32(), pa.list_(pa.int32()), pa.binary(8), pa.list_(pa.list_(pa.float32()))])
def test_gradients_of_other_types_are_refused(kind):
    assert "column 'gradient': expected fixed_size_list, list or large_list of float16" in str(
        error_of([batch_of(1, gradient=pa.nulls(1, kind))])
    )


def test_rows_of_one_table_in_a_row_are_a_view_of_the_producers_memory():
    flat = np.arange(8, dtype=np.float32)
    (frame,) = frames_of([batch_of(4, gradient=pa.FixedSizeListArray.from_arrays(pa.array(flat), 2))])
    assert np.shares_memory(frame.rows["user"][0].grads, flat)


def test_lists_of_several_dims_are_views_too_where_a_tables_rows_lie_together():
    flat = np.arange(10, dtype=np.float32)
    column = pa.ListArray.from_arrays(pa.array([0, 2, 4, 7, 10], pa.int32()), pa.array(flat))
    (frame,) = frames_of([batch_of(4, gradient=column, table=pa.array(["user", "user", "item", "item"]))], TWO)
    for table, wanted in (("user", [[0, 1], [2, 3]]), ("item", [[4, 5, 6], [7, 8, 9]])):
        (block,) = frame.rows[table]
        assert block.grads.tolist() == wanted
        assert np.shares_memory(block.grads, flat)


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_buffers_that_the_producer_did_not_align(shift):
    def shifted(array):
        raw = b"x" * shift + array.tobytes()
        return pa.py_buffer(raw).slice(shift)

    ids = pa.Array.from_buffers(pa.int64(), 2, [None, shifted(np.array([5, 6]))])
    flat = pa.Array.from_buffers(pa.float32(), 4, [None, shifted(np.arange(4, dtype=np.float32))])
    steps = pa.Array.from_buffers(pa.int64(), 2, [None, shifted(np.array([8, 8]))])
    fixed = pa.FixedSizeListArray.from_arrays(flat, 2)
    offsets = pa.Array.from_buffers(pa.int32(), 3, [None, shifted(np.array([0, 2, 4], np.int32))])
    for column in (fixed, pa.ListArray.from_arrays(offsets, flat)):
        (frame,) = frames_of([batch_of(2, id=ids, gradient=column, step=steps)])
        assert rows_of(frame) == {"user": [(5, [0.0, 1.0]), (6, [2.0, 3.0])]}
        assert frame.local_step == 8
        assert frame.rows["user"][0].grads.flags.aligned


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
    dictionary = pa.array(["nobody", "user", None, "user", "item"])
    same = {"user": (100, 2), "item": (100, 2)}
    indices = pa.array([1, 3, 4, 1], pa.int8())
    batch = batch_of(4, table=pa.DictionaryArray.from_arrays(indices, dictionary))
    assert {t: [i for i, _ in rows] for t, rows in rows_of(frames_of([batch], same)[0]).items()} == {
        "user": [0, 1, 3],
        "item": [2],
    }
    for bad, what in ((0, "'nobody'"), (2, "null"), (None, "null")):
        indices = pa.array([1, 4, bad], pa.int8())
        error = error_of([batch_of(3, table=pa.DictionaryArray.from_arrays(indices, dictionary))], same)
        assert place_of(error) == (0, 2, "table", "unknown_table")
        assert f"expected a table of the configuration (user, item), got {what}" in str(error)


def test_a_dictionary_of_string_views():
    column = pa.DictionaryArray.from_arrays(pa.array([2, 1], pa.int8()), pa.array(VIEWS, pa.string_view()))
    batch = batch_of(2, table=column, step=pa.array([1, 1]), contributor=column)
    assert [(f.contributor, list(f.rows)) for f in frames_of([batch], {"user": (9, 2), "item": (9, 2)})] == [
        ("item", ["item"]),
        ("user", ["user"]),
    ]


def test_an_unknown_table_is_told_with_the_nearest_name():
    error = error_of([batch_of(2, table=pa.array(["user", "User"]))])
    assert place_of(error) == (0, 1, "table", "unknown_table")
    assert "did you mean 'user'?" in str(error)


def test_a_dictionary_far_larger_than_its_batches_is_only_looked_at_where_used():
    many = pa.array([f"worker{i}" for i in range(300_000)])
    indices = pa.array([299_999, None, 5, 5], pa.int32())
    batch = batch_of(4, step=pa.array([1] * 4), contributor=pa.DictionaryArray.from_arrays(indices, many))
    assert [f.contributor for f in frames_of([batch])] == ["worker299999", None, "worker5"]


def test_where_rows_do_not_say_their_table_the_metadata_then_the_option_then_the_only_table_does():
    same = {"user": (100, 2), "item": (100, 2)}
    said = batch_of().replace_schema_metadata({"penstock.table": "item"})
    assert list(frames_of([said], same, table="user")[0].rows) == ["item"]
    assert list(frames_of([batch_of()], same, table="user")[0].rows) == ["user"]
    assert list(frames_of([batch_of()])[0].rows) == ["user"]
    assert "give --table; did you mean --column table=Table?" in str(
        error_of([batch_of(Table=pa.array(["user"] * 2))], same)
    )
    error = error_of([batch_of().replace_schema_metadata({"penstock.table": "usr"})])
    assert place_of(error) == (0, 0, None, "unknown_table")
    assert "got 'usr' from the schema's metadata, penstock.table; did you mean 'user'?" in str(error)


def test_an_option_that_names_no_table_is_refused_at_once():
    with pytest.raises(
        UsageError, match=r"table 'itm' is not in the configuration \(user, item\); did you mean 'item'"
    ):
        ReadOptions(TWO, table="itm")


# ---- step and contributor


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_steps_of_any_integer_type(kind):
    assert [f.local_step for f in frames_of([batch_of(3, step=pa.array([4, 5, 5], kind))])] == [4, 5]


@pytest.mark.parametrize(
    "column",
    [pa.array(["a", None, "b", "b"], kind) for kind in TEXTS]
    + [pa.array(["a", None, "b", "b"]).dictionary_encode("encode")],
    ids=lambda c: str(c.type),
)
def test_contributors_of_any_text_type_a_null_is_one_of_its_own(column):
    frames = frames_of([batch_of(4, step=pa.array([1] * 4), contributor=column)])
    assert [(f.contributor, f.num_rows) for f in frames] == [("a", 1), (None, 1), ("b", 2)]


def test_what_lies_under_a_null_of_a_string_view_is_never_looked_at():
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


def test_a_step_that_is_no_int64_is_an_error():
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
def test_a_learning_rate_that_is_missing_is_an_error_with_its_place(bad, message):
    column = pa.array([[0.5, 0.25], bad], pa.list_(pa.float32()))
    error = error_of([batch_of(learning_rates=column)], num_tags=2)
    assert place_of(error) == (0, 1, "learning_rates", None)
    assert message in str(error)


def test_learning_rates_that_nothing_gives_are_an_error_before_the_first_row():
    with pytest.raises(ConfigError, match=r"the value of tag 0: add --learning-rate 0=VALUE"):
        frames_of([batch_of()], num_tags=1, rates_needed=(0,))


# ---- names


def test_column_order_and_extra_columns_do_not_matter():
    extra = pa.array([{"a": None}, {"a": 1}])
    batch = pa.RecordBatch.from_pydict(
        {"zzz": extra, "gradient": gradients([[1, 2], [3, 4]]), "id": pa.array([5, 6]), "more": pa.nulls(2)}
    )
    assert rows_of(frames_of([batch])[0]) == {"user": [(5, [1, 2]), (6, [3, 4])]}


def test_columns_of_other_names_are_told_by_role_and_one_may_play_two():
    batch = pa.RecordBatch.from_pydict({"key": pa.array([5, 5]), "grad": gradients([[1, 2], [3, 4]])})
    (frame,) = frames_of([batch], columns={"id": "key", "gradient": "grad", "step": "key"})
    assert rows_of(frame) == {"user": [(5, [1, 2]), (5, [3, 4])]}
    assert frame.local_step == 5
    assert error_of([batch], columns={"id": "key", "gradient": "grad", "table": "nope"}).column is None


@pytest.mark.parametrize(
    ("name", "role"), [("grad", "gradient"), ("Gradients", "gradient"), ("ID", "id"), ("ids", "id")]
)
def test_a_near_miss_is_suggested(name, role):
    batch = batch_of(**{role: None, name: batch_of()[role]})
    assert f"no column '{role}' for the role '{role}'; did you mean --column {role}={name}? (the stream has: " in str(
        error_of([batch])
    )


def test_a_column_that_is_there_twice_is_refused():
    batch = pa.RecordBatch.from_arrays([batch_of()["id"], *batch_of().columns], names=["id", "id", "gradient"])
    assert "column 'id': 2 columns have this name; keep one" in str(error_of([batch]))


def test_a_role_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(
        UsageError, match=r"column role 'grad': expected one of id, gradient, .*did you mean 'gradient'"
    ):
        ReadOptions(SIZES, columns={"grad": "gradient"})


@pytest.mark.parametrize(
    "bad", [{"merge": "time"}, {"on_bad_row": "skip"}, {"gradient_dtype": "int8"}, {"contribution_rows": 0}], ids=str
)
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(UsageError, match=f"{next(iter(bad))}: expected"):
        ReadOptions(SIZES, **bad)


# ---- validation


def test_indices_outside_their_dictionary_are_an_error_not_a_read_beyond_it():
    indices = pa.array([0, 9], pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, pa.array(["user"]), safe=False)
    error = error_of([batch_of(table=column)])
    assert place_of(error) == (0, None, "table", None)
    assert "corrupt Arrow data" in str(error)


def test_offsets_outside_their_values_are_an_error_not_a_read_beyond_them():
    batch = batch_of(gradient=pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32())))
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    offsets = np.array([0, 2, 4], np.int32).tobytes()
    damaged = sink.getvalue().replace(offsets, offsets[:8] + b"\0\0\1\0")
    error = error_of(io.BytesIO(damaged))
    assert place_of(error) == (0, None, "gradient", None)
    assert "corrupt Arrow data" in str(error)


# ---- every row, against plain Python

TABLES = ["user", "item", "other", None]
floats = st.one_of(st.sampled_from([math.nan, math.inf, 1e39, None]), st.floats(-8, 8, width=16))


@st.composite
def row_lists(draw):
    good = draw(st.booleans())
    rows = []
    for _ in range(draw(st.integers(0, 12))):
        table = draw(st.sampled_from(TABLES[: 2 if good else 4]))
        dim = TWO.get(table, (0, 2))[1]
        if good:
            row = (
                table,
                draw(st.integers(0, 49)),
                draw(st.lists(st.floats(-8, 8, width=16), min_size=dim, max_size=dim)),
            )
        else:
            ids = st.one_of(st.none(), st.integers(-2, 101))
            row = (table, draw(ids), draw(st.one_of(st.none(), st.lists(floats, min_size=dim - 1, max_size=dim + 1))))
        rows.append(row)
    return rows


def reason_of(table, i, gradient):
    """The contract's reasons, in the order in which the first one is told."""
    if table not in TWO:
        return "unknown_table"
    if i is None:
        return "id_null"
    if not 0 <= i < TWO[table][0]:
        return "id_out_of_range"
    if gradient is None or None in gradient:
        return "gradient_null"
    if len(gradient) != TWO[table][1]:
        return "length_mismatch"
    with np.errstate(over="ignore"):
        return None if all(math.isfinite(np.float32(v)) for v in gradient) else "gradient_not_finite"


@given(row_lists(), st.sampled_from(TEXTS), st.sampled_from([pa.list_, pa.large_list]), st.integers(0, 3))
@settings(deadline=None, max_examples=150)
def test_every_row_is_taken_or_dropped_for_its_reason_as_a_plain_loop_would(rows, text, make, start):
    names = pa.array([t for t, _, _ in rows], pa.utf8()).cast(text)
    grads = pa.array([g for _, _, g in rows], make(pa.float64()))
    batch = batch_of(len(rows), id=pa.array([i for _, i, _ in rows], pa.int64()), gradient=grads, table=names)
    wanted, dropped = {}, {}
    for table, i, gradient in rows[start:]:
        reason = reason_of(table, i, gradient)
        if reason is None:
            wanted.setdefault(table, []).append((i, [float(np.float32(v)) for v in gradient]))
        else:
            dropped[reason] = dropped.get(reason, 0) + 1
    reader = FrameReader([batch.slice(start)], ReadOptions(TWO, on_bad_row="drop"))
    frames = list(reader)
    assert len(frames) == (1 if rows[start:] else 0)
    for frame in frames:
        assert rows_of(frame) == wanted
        assert frame.dropped == dropped
        assert frame.num_rows == len(rows[start:])
    assert set(reader.first_bad) == set(dropped)
    if dropped:
        error = error_of([batch.slice(start)], TWO)
        first = next(n for n, row in enumerate(rows[start:]) if reason_of(*row))
        assert (error.row, error.reason) == (first, reason_of(*rows[start:][first]))


# ---- arrays as one frame


def test_arrays_of_either_byte_order_and_any_float_make_the_same_frame():
    wanted = {"user": [(3, [0.5, -1.0]), (9, [2.0, 4.0])]}
    for kind in ("<f2", "<f4", ">f4", "<f8", ">f8", "longdouble"):
        for ids in ("<i8", ">i8", "u1", ">u2"):
            values = np.array([[0.5, -1.0], [2.0, 4.0]], kind)
            assert rows_of(one_frame({"user": (np.array([3, 9], ids), values)}, SIZES, None)) == wanted


def test_a_bad_row_of_an_array_is_told_with_its_table_and_row():
    with pytest.raises(InputError, match=r"apply\('user'\): row 1, column 'id': expected 0 <= id < 100") as caught:
        one_frame({"user": ([3, 100], [[0.5, 1.0], [1.0, 1.0]])}, SIZES, 7)
    assert caught.value.reason == "id_out_of_range"


@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        ([1.5], [[1.0, 2.0]], "expected integers of shape"),
        ([1], [1.0, 2.0], "expected floats of shape"),
        ([1], [["a", "b"]], "expected floats of shape"),
        ([1, 2], [[1.0, 2.0]], "expected as many gradients as ids, got 2 ids and 1 gradients"),
        ([1], [[1.0, 2.0, 3.0]], "expected 2 floats"),
    ],
)
def test_arrays_of_the_wrong_shape_or_type_are_refused(ids, values, message):
    with pytest.raises(InputError, match=message):
        one_frame({"user": (ids, values)}, SIZES, None)
