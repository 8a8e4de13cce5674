"""Arrays of every kind at every method that takes arrays: the right value, or one clear line, and nothing changed."""

import array
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from services import client_of, service_of

import penstock as ps

IDS = [2, 1]
GRADIENTS = np.array([[0.5, 1.0], [-2.0, 4.0]], np.float32)


def library(name):
    return pytest.importorskip(name, exc_type=ImportError)


def engine_of(**arguments):
    table = ps.TableConfig(4, 2, ps.Constant(1.0), ps.SGD(1.0), combiner="sum", name="t")
    features = [ps.FeatureConfig(table, name="f")]
    return ps.Engine(ps.EmbeddingConfig.from_features(features, batch_size=2), threads=1, **arguments)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """An engine whose rows differ, with readers of its rows in this and in other processes."""
    folder = tmp_path_factory.mktemp("shared")
    engine = engine_of(shared=folder)
    engine.load_parameters("t", np.arange(8).reshape(4, 2))
    with service_of(engine) as service, client_of(service) as client:
        yield SimpleNamespace(engine=engine, reader=ps.Reader(folder), client=client)


def row(number):
    return [2.0 * number, 2.0 * number + 1.0]


def changed(engine):
    return engine.lookup("t", range(4)).tolist()


def applied(ids=IDS, gradients=GRADIENTS):
    engine = engine_of()
    before = engine.state_hash()
    try:
        engine.apply({"t": (ids, gradients)})
    except ps.PenstockError:
        assert engine.state_hash() == before
        raise
    return changed(engine)


def loaded(ids=IDS, rows=GRADIENTS):
    engine = engine_of()
    engine.load_parameters("t", rows, ids=ids)
    return changed(engine)


def accumulated(ids=IDS, values=GRADIENTS):
    accumulator = ps.SparseConditionalAccumulator()
    accumulator.apply_gradient(ids, values)
    gradient = accumulator.take_gradient(1)
    return gradient.indices.tolist(), gradient.values.tolist()


def initial(values):
    table = ps.TableConfig(2, 2, lambda shape, dtype: values, ps.SGD(1.0), name="t")
    return ps.Engine(ps.EmbeddingConfig.from_tables([table]), threads=1).lookup("t", [0, 1]).tolist()


def summed(value):
    accumulator = ps.ConditionalAccumulator()
    accumulator.apply_gradient(value)
    return accumulator.take_gradient(1).tolist()


def sent(gradient):
    engine = engine_of()
    _, data = engine.recv_activations([IDS])
    engine.send_gradients([gradient], deduplication_data=data)
    return changed(engine)


# Each takes ids; with IDS, it returns the second value.
TAKES_IDS = {
    "apply": (lambda _, ids: applied(ids), [[1, 1], [3, -3], [0.5, 0], [1, 1]]),
    "load_parameters": (lambda _, ids: loaded(ids), [[1, 1], [-2, 4], [0.5, 1], [1, 1]]),
    "accumulator": (lambda _, ids: accumulated(ids), ([1, 2], [[-2, 4], [0.5, 1]])),
    "lookup": (lambda numbered, ids: numbered.engine.lookup("t", ids).tolist(), [row(2), row(1)]),
    "reader": (lambda numbered, ids: numbered.reader.lookup("t", ids).tolist(), [row(2), row(1)]),
    "client": (lambda numbered, ids: numbered.client.lookup({"t": ids})["t"].tolist(), [row(2), row(1)]),
    "activations": (lambda numbered, ids: numbered.engine.recv_activations([ids])[0][0].tolist(), [row(2), row(1)]),
    "coordinates": (
        lambda numbered, ids: numbered.engine.recv_activations([ps.CooIds([0, 1], ids)])[0][0].tolist(),
        [row(2), row(1)],
    ),
}

# Each takes GRADIENTS in float32 only: TensorFlow casts no gradient.
TAKES_FLOAT32 = {
    "accumulator": lambda values: accumulated(values=values),
    "dense accumulator": summed,
    "send_gradients": sent,
}
TAKES_FLOATS = {
    "weights": lambda values: engine_of().recv_activations([[IDS, IDS]], [values])[0][0].tolist(),
    "initializer": initial,
    "apply": lambda values: applied(gradients=values),
    "load_parameters": lambda values: loaded(rows=values),
}


class OnlyDlpack:
    """An array that other libraries read by DLPack alone."""

    def __init__(self, values):
        self._values = values

    def __dlpack__(self, **arguments):
        return self._values.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


def read_only(values):
    values.flags.writeable = False
    return values


def in_two_chunks(values):
    return pa.chunked_array([values[:1], values[1:]])


def of_pandas(values, kind=None):
    """A series whose index is neither ascending nor that of the values."""
    return library("pandas").Series(values, index=[7, 3], dtype=kind)


def lists(kind=pa.list_, width=()):
    return pa.array(GRADIENTS.tolist(), kind(pa.float32(), *width))


def tensor(permutation=None):
    flat = pa.array(np.concatenate([GRADIENTS.ravel()] * 2)).cast(pa.float32())
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 2] if permutation else [2], permutation=permutation)
    storage = pa.FixedSizeListArray.from_arrays(flat if permutation else flat[:4], 4 if permutation else 2)
    return pa.ExtensionArray.from_storage(kind, storage)


INTEGERS = {
    "list": lambda: IDS,
    "tuple": lambda: tuple(IDS),
    "range": lambda: range(2, 0, -1),
    "numpy scalars": lambda: [np.int32(2), np.uint64(1)],
    **{
        f"numpy {kind}": lambda kind=kind: np.array(IDS, kind) for kind in ("i1", "u2", "i4", "i8", "u8", ">i8", object)
    },
    "objects of numpy": lambda: np.array([np.int32(2), 1], object),
    "negative stride": lambda: np.array([1, 2])[::-1],
    "strided": lambda: np.array([[2, 9], [1, 9]])[:, 0],
    "read-only": lambda: read_only(np.array(IDS)),
    "memoryview": lambda: memoryview(np.array(IDS)),
    "bytearray": lambda: bytearray(IDS),
    "array.array": lambda: array.array("q", IDS),
    "dlpack": lambda: OnlyDlpack(np.array(IDS)),
    "arrow": lambda: pa.array(IDS, pa.uint8()),
    "sliced arrow": lambda: pa.array([None, *IDS])[1:],
    "chunked arrow": lambda: in_two_chunks(pa.array(IDS)),
    "arrow dictionary": lambda: pa.array(IDS).dictionary_encode(),
    "jax": lambda: library("jax").numpy.array(IDS),
    "pandas": lambda: of_pandas(IDS),
    "pandas Int64": lambda: of_pandas(IDS, "Int64"),
    "pandas category": lambda: of_pandas(IDS, "category"),
    "pandas of arrow": lambda: of_pandas(IDS, library("pandas").ArrowDtype(pa.int64())),
    "pandas index": lambda: library("pandas").Index(IDS),
    "polars": lambda: library("polars").Series(IDS),
    "nanoarrow": lambda: library("nanoarrow").array(pa.array(IDS)),
    "torch": lambda: library("torch").tensor(IDS),
}


def objects(second):
    """A row next to another object, in an array of objects."""
    rows = np.empty(2, object)
    rows[0], rows[1] = GRADIENTS[0], second
    return rows


def floats(kind):
    return lambda: GRADIENTS.astype(kind)


FLOAT32 = {
    "list": lambda: GRADIENTS.tolist(),
    "list of arrays": lambda: list(GRADIENTS),
    "numpy": lambda: GRADIENTS,
    "big-endian": floats(">f4"),
    "fortran": lambda: np.asfortranarray(GRADIENTS),
    "negative strides": lambda: GRADIENTS[::-1, ::-1].copy()[::-1, ::-1],
    "read-only": lambda: read_only(GRADIENTS.copy()),
    "matrix": lambda: np.ndarray.__new__(np.recarray, (2, 2), np.float32, GRADIENTS),
    "memoryview": lambda: memoryview(GRADIENTS),
    "dlpack": lambda: OnlyDlpack(GRADIENTS),
    "arrow list": lists,
    "arrow large list": lambda: lists(pa.large_list),
    "arrow fixed-size list": lambda: lists(width=(2,)),
    "sliced arrow": lambda: pa.concat_arrays([lists(width=(2,)), lists(width=(2,))])[2:],
    "chunked arrow": lambda: in_two_chunks(lists()),
    "arrow tensor": tensor,
    "jax": lambda: library("jax").numpy.array(GRADIENTS),
    "pandas frame": lambda: library("pandas").DataFrame(GRADIENTS, index=[7, 3]),
    "pandas arrays": lambda: of_pandas(list(GRADIENTS)),
    "numpy objects": lambda: np.array([*GRADIENTS, None], object)[:2],
    "pandas lists of arrow": lambda: of_pandas(GRADIENTS.tolist(), library("pandas").ArrowDtype(lists().type)),
    "polars frame": lambda: library("polars").DataFrame(GRADIENTS),
    "polars lists": lambda: library("polars").Series(lists()),
    "polars arrays": lambda: library("polars").Series(GRADIENTS),
    "torch": lambda: library("torch").tensor(GRADIENTS),
    "torch, requires grad": lambda: library("torch").tensor(GRADIENTS, requires_grad=True),
    "torch parameter": lambda: library("torch").nn.Parameter(library("torch").tensor(GRADIENTS)),
    "torch, transposed": lambda: library("torch").tensor(GRADIENTS.T.copy()).T,
    "torch, negated view": lambda: library("torch").tensor(-1j * GRADIENTS).conj().imag,
}

# Of other types, whose values are those of GRADIENTS.
OTHER_FLOATS = {
    "float16": floats(np.float16),
    "float64": floats(np.float64),
    "longdouble": floats(np.longdouble),
    "arrow float16": lambda: pa.FixedSizeListArray.from_arrays(pa.array(GRADIENTS.ravel().astype(np.float16)), 2),
    "jax bfloat16": lambda: library("jax").numpy.array(GRADIENTS, "bfloat16"),
    "torch bfloat16": lambda: library("torch").tensor(GRADIENTS).bfloat16().requires_grad_(),
    "torch float64": lambda: library("torch").tensor(GRADIENTS).double(),
    "pandas frame": lambda: library("pandas").DataFrame(GRADIENTS.astype(np.float64)),
    "pandas frame of Float32": lambda: library("pandas").DataFrame(GRADIENTS).astype("Float32"),
    "pandas lists": lambda: of_pandas(GRADIENTS.tolist()),
}

# Neither integers nor floats. Each with a part of the message, where a conversion could use what is hidden.
REFUSED = {
    "object": (object, "object"),
    "text": (lambda: "21", "got str"),
    "bytes": (lambda: b"21", "got bytes"),
    "dict": (lambda: dict(enumerate(IDS)), "dict"),
    "set": (lambda: set(IDS), "set"),
    "generator": (lambda: (value for value in IDS), "generator"),
    "None in a list": (lambda: [None, 1], "object|NoneType"),
    "bool": (lambda: np.array([True, False]), "bool"),
    "complex": (lambda: GRADIENTS.astype(np.complex64), "complex64|shape"),
    "datetime": (lambda: np.array(IDS, "M8[s]"), "datetime64"),
    "numpy S": (lambda: np.array([b"2", b"1"]), r"S1"),
    "numpy U": (lambda: np.array(["2", "1"]), "<U1"),
    "numpy strings": (lambda: np.array(["2", "1"], np.dtypes.StringDType()), "StringDType"),
    "numpy objects": (lambda: np.array([b"2", "1"], object), "object|got bytes"),
    "structured": (lambda: np.array([(2,), (1,)], [("a", "i8")]), "'a'"),
    "masked": (lambda: np.ma.array(IDS, mask=[1, 0]), r"masked array \(numpy.ma\)"),
    "masked objects": (lambda: objects(np.ma.array(GRADIENTS[0], mask=[1, 0])), r"masked array|object|shape"),
    "objects of several lengths": (lambda: objects(GRADIENTS[0, :1]), "several lengths|object|integer"),
    "None in objects": (lambda: objects([0.5, None]), "object"),
    "masked floats": (lambda: np.ma.array(GRADIENTS, mask=GRADIENTS < 0), r"masked array \(numpy.ma\)"),
    "arrow text": (lambda: pa.array(["2", "1"]), "object|string"),
    "arrow views": (lambda: pa.array(["2", "1"], pa.string_view()), "object|string"),
    "arrow bytes": (lambda: pa.array([b"2", b"1"], pa.binary(1)), "object|binary"),
    "arrow bools": (lambda: pa.array([True, False]), "bool"),
    "arrow with nulls": (lambda: pa.array([2, None]), "null|int64"),
    "arrow lists with nulls": (lambda: pa.array([[0.5, None], [1.0, 2.0]], pa.list_(pa.float32(), 2)), "null|integer"),
    "arrow, permuted tensor": (lambda: tensor([1, 0]), "permutation|integer"),
    "arrow scalar": (lambda: pa.scalar(2), "Int64Scalar|object"),
    "pandas text": (lambda: of_pandas(["2", "1"]), "object|got str"),
    "pandas with NA": (lambda: of_pandas([2, None], "Int64"), "Series with missing values"),
    "pandas with NaN": (lambda: library("pandas").DataFrame([[1.0, 2.0], [3.0, None]]), "missing values"),
    "pandas timestamps": (lambda: library("pandas").Series(library("pandas").to_datetime([1, 2])), "datetime64"),
    "polars with nulls": (lambda: library("polars").Series([2, None]), "1 null"),
    "polars text": (lambda: library("polars").Series(["2", "1"]), "object|string"),
    "scipy": (lambda: library("scipy.sparse").csr_array(GRADIENTS), r"csr_array; toarray\(\) gives one"),
    "jax, deleted": (lambda: deleted(library("jax").numpy.array(IDS)), "deleted"),
    "torch, sparse": (lambda: library("torch").tensor(GRADIENTS).to_sparse(), "to_dense"),
    "torch, without data": (lambda: library("torch").empty(2, device="meta"), "meta"),
    "torch, conjugated": (lambda: library("torch").tensor(1j * GRADIENTS).conj(), "complex64|shape"),
}


def deleted(values):
    values.delete()
    return values


def check_ids(numbered, create):
    for method, (call, wanted) in TAKES_IDS.items():
        assert (method, call(numbered, create())) == (method, wanted)


def check_float32(create, *, has_dtype=True):
    for method, call in (TAKES_FLOATS | TAKES_FLOAT32).items():
        if has_dtype or method != "send_gradients":
            assert (method, call(create())) == (method, call(GRADIENTS))


def check_other_floats(create):
    for call in TAKES_FLOATS.values():
        assert call(create()) == call(GRADIENTS)
    for call in TAKES_FLOAT32.values():
        with pytest.raises(ValueError, match=r"expected float32, got [a-z]*float[0-9]+.*cast it"):
            call(create())


def check_refused(numbered, create, message):
    calls = {name: lambda value, call=call: call(numbered, value) for name, (call, _) in TAKES_IDS.items()}
    calls |= {
        f"gradients of {name}": call for name, call in (TAKES_FLOATS | TAKES_FLOAT32).items() if name != "weights"
    }
    for name, call in calls.items():
        with pytest.raises((ps.InputError, ps.UsageError, ps.ConfigError), match=message) as caught:
            pytest.fail(f"{name} gave {call(create())}")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", INTEGERS)
def test_ids_are_arrays_of_integers_of_any_library(numbered, kind):
    check_ids(numbered, INTEGERS[kind])


@pytest.mark.parametrize("kind", FLOAT32)
def test_gradients_are_arrays_of_any_library(kind):
    check_float32(FLOAT32[kind], has_dtype=kind != "list")


@pytest.mark.parametrize("kind", OTHER_FLOATS)
def test_gradients_of_other_floats_are_converted_or_refused_where_tensorflow_casts_none(kind):
    check_other_floats(OTHER_FLOATS[kind])


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_is_refused_in_one_line_by_every_method(numbered, kind):
    check_refused(numbered, *REFUSED[kind])


EMPTY = {
    "arrow": lambda: (pa.array([], pa.int64()), pa.array([], pa.list_(pa.float32()))),
    "numpy": lambda: (np.zeros(0, np.int64), np.zeros((0, 2), np.float32)),
    "numpy and arrow": lambda: (np.zeros(0, np.int64), pa.array([], pa.list_(pa.float32()))),
    "numpy objects": lambda: (np.array([], object), np.array([], object)),
    "pandas": lambda: (library("pandas").Series([], dtype="int64"), library("pandas").Series([], dtype=object)),
    "polars": lambda: (library("polars").Series(IDS).clear(), library("polars").Series(lists()).clear()),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_columns_without_rows_change_nothing(kind):
    assert applied(*EMPTY[kind]()) == changed(engine_of())


@pytest.mark.parametrize("kind", ["int64", "Int64", "int64[pyarrow]", "object"])
def test_a_frame_of_ids_is_a_row_per_sample_whatever_its_columns_are_called(kind):
    engine = engine_of()
    engine.load_parameters("t", np.arange(8).reshape(4, 2))
    frame = library("pandas").DataFrame({0: IDS, 1: [0, 3]}, dtype=kind)  # names that are ids, too
    weights = library("pandas").DataFrame({0: [1.0, 1.0], 1: [0.5, 2.0]}).astype("Float32")
    activations, _ = engine.recv_activations([frame], [weights])
    assert activations[0].tolist() == [[4.0, 5.5], [14.0, 17.0]]


def test_tensors_of_tensorflow_are_arrays_as_well(numbered):
    tensorflow = library("tensorflow")
    check_ids(numbered, lambda: tensorflow.constant(IDS))
    check_float32(lambda: tensorflow.constant(GRADIENTS))
    check_float32(lambda: tensorflow.Variable(GRADIENTS))
    check_other_floats(lambda: tensorflow.cast(GRADIENTS, "bfloat16"))
    check_refused(numbered, lambda: tensorflow.constant(["2", "1"]), "object|got bytes")
    slices = tensorflow.IndexedSlices(tensorflow.constant(GRADIENTS), tensorflow.constant(IDS))
    check_refused(numbered, lambda: slices, "IndexedSlices|NoneType")
