"""Every column type of a row stream, and the report of every bad row, against a slow reading in plain Python."""

import math

import numpy as np
import pyarrow as pa
import pytest
from columns import FLOATS, INTEGERS, LISTS, TWO, batch_of, error_of, frames_of, place_of, rows_of

# ---- id


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_ids_of_any_integer_type(kind):
    (frame,) = frames_of([batch_of(3, id=pa.array([0, 99, 7], kind))])
    (block,) = frame.rows["user"]
    assert block.ids.dtype == np.int64
    assert block.ids.tolist() == [0, 99, 7]


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_an_id_outside_the_vocabulary_is_reported_with_batch_and_row(kind):
    good, bad = (batch_of(3, id=pa.array([0, 99, last], kind)) for last in (7, 100))
    error = error_of([good, bad])
    assert place_of(error) == (1, 2, "id", "id_out_of_range")
    assert "expected 0 <= id < 100 (vocabulary_size of table 'user'), got 100" in str(error)


def test_a_hash_in_a_static_table_is_an_error_that_names_dynamic_tables():
    hint = "; ids that are hashes need a dynamic table"
    for value, is_hash in ((2**40, True), (-(2**62), True), (2**40 - 1, False), (-1, False)):
        error = error_of([batch_of(1, id=pa.array([value], pa.int64()))])
        assert str(error).endswith(f"got {value}{hint if is_hash else ''} [id_out_of_range]")
    error = error_of([batch_of(1, id=pa.array([2**63], pa.uint64()))])
    assert str(error).endswith(f'got {2**63}{hint}, of key_type="uint64" (in text UINT64) [id_out_of_range]')


@pytest.mark.promise("No id is wrapped or redirected to another row")
@pytest.mark.parametrize(
    ("kind", "value"),
    [(pa.int8(), -1), (pa.int64(), -(2**63)), (pa.int64(), 2**63 - 1), (pa.uint64(), 2**63), (pa.uint64(), 2**64 - 1)],
    ids=str,
)
def test_ids_are_never_wrapped(kind, value):
    error = error_of([batch_of(2, id=pa.array([3, value], kind))])
    assert place_of(error) == (0, 1, "id", "id_out_of_range")
    assert f"got {value}" in str(error)


@pytest.mark.parametrize("kind", [pa.float64(), pa.bool_(), pa.utf8(), pa.decimal128(5, 0), pa.null()], ids=str)
def test_ids_of_other_types_are_refused_by_name_and_type(kind):
    error = error_of([batch_of(1, id=pa.nulls(1, kind))])
    assert f"column 'id': expected any integer type, got {kind}" in str(error)


# ---- gradient

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


@pytest.mark.parametrize(
    ("dtype_name", "message"), [("float64", "lists of float64"), ("bfloat16", "do not declare it")]
)
def test_a_gradient_dtype_that_is_not_the_columns_is_an_error(dtype_name, message):
    assert message in str(error_of([batch_of()], gradient_dtype=dtype_name))
    assert frames_of([batch_of()], gradient_dtype="float32")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
@pytest.mark.parametrize("make", LISTS, ids=["fixed", "list", "large", "tensor"])
def test_values_not_finite_as_float32_are_reported_with_row_and_position(make, bad):
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
def test_null_gradients_and_nulls_inside_are_bad_rows(make):
    for bad in (None, [1.0, None]):
        batch = batch_of(3, gradient=array_of([[1.0, 1.0], [2.0, 2.0], bad], make(pa.float32())))
        assert place_of(error_of([batch])) == (0, 2, "gradient", "gradient_null")
        assert place_of(error_of([batch.slice(2)])) == (0, 0, "gradient", "gradient_null")
        assert len(frames_of([batch.slice(0, 2)])) == 1


@pytest.mark.parametrize("rows", [[[1.0]], [[1.0, 2.0, 3.0]], [[]], [[1.0, 2.0], [1.0]]], ids=str)
def test_a_list_of_another_length_than_dim_is_a_bad_row(rows):
    for kind in (pa.list_(pa.float32()), pa.large_list(pa.float64())):
        error = error_of([batch_of(len(rows), gradient=pa.array(rows, kind))])
        assert place_of(error) == (0, len(rows) - 1, "gradient", "length_mismatch")
        assert f"expected 2 floats (dim of table 'user'), got {len(rows[-1])}" in str(error)


@pytest.mark.parametrize("width", [0, 1, 3])
def test_a_fixed_size_list_of_another_length_than_dim_is_a_bad_row(width):
    error = error_of([batch_of(2, gradient=pa.array([[1.0] * width] * 2, pa.list_(pa.float32(), width)))])
    assert place_of(error) == (0, 0, "gradient", "length_mismatch")


@pytest.mark.parametrize("kind", [pa.float32(), pa.list_(pa.int32()), pa.binary(8), pa.list_(pa.list_(pa.float32()))])
def test_gradients_of_other_types_are_refused(kind):
    assert "column 'gradient': expected fixed_size_list, list or large_list of float16" in str(
        error_of([batch_of(1, gradient=pa.nulls(1, kind))])
    )


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
