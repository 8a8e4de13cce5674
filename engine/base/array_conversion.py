"""Arrays of other libraries as NumPy's: every argument that is an array is converted here, without a copy if possible.

A conversion must not use what an array hides: masked arrays and nulls are refused. No other library is imported before
a caller passes one of its arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import InputError
from penstock.base.validation import MASKED, is_masked

if TYPE_CHECKING:
    import pyarrow as pa

Array = npt.NDArray[Any]


class _NoArrayError(ValueError):
    """Values are no array. got : what they are"""

    def __init__(self, got: str) -> None:
        super().__init__(f"expected an array, got {got}")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Convert the errors of libraries, which may be of any class, to ValueErrors of one line."""
    try:
        yield
    except (_NoArrayError, MemoryError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"expected an array: {reason}") from error


@contextmanager
def _refused(place: str, kind: type[ValueError]) -> Iterator[None]:
    """Give the ValueErrors of a conversion their kind and place."""
    try:
        yield
    except ValueError as error:
        if not place:
            raise
        raise (InputError(str(error), source=place) if kind is InputError else kind(f"{place}: {error}")) from None


def as_array(values: Any, place: str = "", kind: type[ValueError] = ValueError) -> Array:
    """Return values as an array in this machine's byte order, of the dtype that they have.

    values : an array of NumPy, jax, torch, TensorFlow, pandas, polars or Arrow, an object with a buffer or with
        ``__dlpack__``, or nested lists; a frame or a table has an axis of columns
    place, kind : of the error, of one line, for anything else, masked arrays and nulls
    """
    with _refused(place, kind):
        return _array(values)


def as_numbers(values: Any, place: str, kind: type[ValueError]) -> Array:
    """Return values as ``as_array`` does, and objects that are numbers or lists of numbers, as in pandas, as numbers.

    place, kind : of the error, as of ``as_array``, and for lists of several lengths
    """
    with _refused(place, kind):
        array = _array(values)
        if array.dtype != object or not array.ndim:
            return array
        numbers = _array(array.tolist())
        return numbers if is_numeric(numbers) else array


def _array(values: Any) -> Array:
    if type(values) is np.ndarray:
        array = values
    elif is_masked(values):
        raise ValueError(MASKED)
    else:
        with _one_line_errors():
            array = _converted(values)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _converted(values: Any) -> Array:
    if isinstance(values, str | bytes):
        raise _NoArrayError(type(values).__name__)
    tensor: Any = getattr(sys.modules.get("torch"), "Tensor", ())
    if isinstance(values, tensor):
        return _of_tensor(values)
    if is_arrow(values):
        return _of_arrow(_arrow(values))
    if hasattr(values, "__dlpack__") and not hasattr(values, "__array__"):
        return np.from_dlpack(values)
    if hasattr(values, "isna") and np.any(values.isna()):  # pandas would make NaN of it
        raise _NoArrayError(f"{type(values).__name__} with missing values")
    try:
        array = np.asarray(values)
    except ValueError:
        if not isinstance(values, list | tuple):
            raise
        raise _NoArrayError("lists of several lengths") from None
    if array.dtype == object and not array.ndim and not isinstance(values, int):
        raise _NoArrayError(type(values).__name__ + ("; toarray() gives one" if hasattr(values, "toarray") else ""))
    return array


def _of_tensor(tensor: Any) -> Array:
    """Return the values of a tensor of torch, from any device."""
    torch = sys.modules["torch"]
    if tensor.dtype != torch.bfloat16:
        array: Array = tensor.numpy(force=True)
        return array
    from ml_dtypes import bfloat16  # torch has no conversion to it

    return _of_tensor(tensor.detach().view(torch.int16)).view(bfloat16)


def is_numeric(array: Array) -> bool:
    """Return whether an array holds integers or floats, which a conversion to floats keeps."""
    return array.dtype.kind in "iuf" or array.dtype.name == "bfloat16"


def is_arrow(values: Any) -> bool:
    """Return whether values are Arrow data; those of pandas are not: their index would become a column."""
    protocols = hasattr(values, "__arrow_c_array__") or hasattr(values, "__arrow_c_stream__")
    return protocols and not hasattr(values, "iloc")


def as_arrow(values: Any, place: str = "", kind: type[ValueError] = ValueError) -> pa.Array:
    """Return Arrow data in memory, of any library, as one array. place, kind : of the error, as of ``as_array``"""
    with _refused(place, kind):
        return _arrow(values)


def _arrow(values: Any) -> pa.Array:
    import pyarrow as pa

    with _one_line_errors():
        if not isinstance(values, pa.Array | pa.ChunkedArray):
            is_array = hasattr(values, "__arrow_c_array__")
            values = pa.array(values) if is_array else pa.chunked_array(values)
        return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def is_permuted(kind: pa.DataType) -> bool:
    """Return whether a type is ``arrow.fixed_shape_tensor`` with its values in another order than its axes."""
    permutation = getattr(kind, "permutation", None)
    return permutation is not None and list(permutation) != sorted(permutation)


def _of_arrow(column: pa.Array) -> Array:
    """Return Arrow data as an array: lists of one length add an axis, the columns of a struct too."""
    import pyarrow as pa

    kind = column.type
    if column.null_count:
        raise _NoArrayError(f"{kind} with {column.null_count} nulls")
    if isinstance(column, pa.ExtensionArray):
        if is_permuted(kind):
            raise _NoArrayError(f"{kind}; store its values in the order of its axes, without a permutation")
        return _of_arrow(column.storage)
    if pa.types.is_dictionary(kind):
        return _of_arrow(column.dictionary_decode())
    if pa.types.is_struct(kind):
        return np.column_stack([_of_arrow(field) for field in column.flatten()])
    if pa.types.is_fixed_size_list(kind):
        inner = _of_arrow(column.flatten())
        return inner.reshape(len(column), kind.list_size, *inner.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = np.diff(column.offsets.to_numpy())
        if len(lengths) and (lengths != lengths[0]).any():
            raise _NoArrayError(f"{kind} of several lengths")
        inner = _of_arrow(column.flatten())
        return inner.reshape(len(column), lengths[0] if len(lengths) else 0, *inner.shape[1:])
    array: Array = column.to_numpy(zero_copy_only=False)
    return array
