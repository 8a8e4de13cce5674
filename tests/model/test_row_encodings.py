"""Encoded rows: how far they are from the rows, and that their bytes depend on nothing else."""

from fractions import Fraction

import numpy as np
import pytest
from evidence import examples
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.base.errors import UsageError
from penstock.model.row_encodings import BFLOAT16, ENCODINGS, FLOAT32, INT8, encoding_of, nearest

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SMALLEST = 2.0**-149
LARGEST = float(np.finfo(np.float32).max)


def rows_of(*rows):
    return np.array(rows, np.float32)


def spread(base, width, dim=16):
    """A row of values that lie apart by parts of ``width``."""
    return (np.float32(base) + np.linspace(0, width, dim)).astype(np.float32)


@given(st.lists(FLOATS, min_size=1, max_size=70))
@example([0.0, -0.0])
@example([1.5])
@example([3 * SMALLEST, 0.0, -2 * SMALLEST])
@example([0.0, 100 * SMALLEST])
@example([0.0, 255 * SMALLEST, 256 * SMALLEST, 1000 * SMALLEST])
@example([0.0, 2.0**-126, 2.0**-127])
@example(spread(0, 1e-9).tolist())
@example(spread(-1e-9, 1e-9).tolist())
@example(spread(1, 2.0**-23).tolist())
@example(spread(1e30, 1e25).tolist())
@example([0.0, LARGEST])
@example([-LARGEST / 2, LARGEST / 2 - LARGEST / 2**20])
@example([LARGEST, LARGEST / 2])
@examples(300, 60)
def test_a_row_in_8_bits_is_as_near_as_promised(values):
    row = rows_of(values)
    encoded = INT8.encode(row)[0]
    scale, bias = encoded[-8:].view("<f4")
    decoded = INT8.decode(encoded[None])[0]
    if np.isnan(scale):  # its range is no float32
        assert np.isnan(decoded).all()
        assert np.float64(row.max()) - row.min() > LARGEST * (1 - 2.0**-20)
        return
    ulp = Fraction(2.0 ** max(int(np.frexp(abs(row).max())[1]) - 24, -149))
    most = (Fraction(float(row.max())) - Fraction(float(row.min()))) / 510 + 2 * ulp
    exact = [Fraction(int(byte)) * Fraction(float(scale)) + Fraction(float(bias)) for byte in encoded[:-8]]
    for value, twice_rounded, real in zip(row[0].tolist(), decoded.tolist(), exact, strict=True):
        once_rounded = float(np.float32(float(real)))  # as by a fused multiplication and addition
        assert abs(Fraction(twice_rounded) - Fraction(value)) <= most
        assert abs(Fraction(once_rounded) - Fraction(value)) <= most


@pytest.mark.parametrize("width", [1e-9, 1e-12, 1e-40, 200 * SMALLEST])
def test_a_small_range_has_all_steps(width):
    assert len(set(INT8.encode(spread(0, width, 256)[None])[0, :256].tolist())) > 100


@given(st.lists(st.lists(FLOATS, min_size=5, max_size=5), min_size=1, max_size=40), st.data())
@examples(60, 15)
@pytest.mark.parametrize("encoding", [BFLOAT16, INT8], ids=lambda each: each.name)
def test_the_bytes_of_a_row_depend_on_no_other_row(encoding, rows, data):
    rows = np.array(rows, np.float32)
    first = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(first + 1, len(rows)))
    assert encoding.encode(rows[first:stop]).tobytes() == encoding.encode(rows)[first:stop].tobytes()
    assert encoding.encode(np.asfortranarray(rows)).tobytes() == encoding.encode(rows).tobytes()


def test_the_bytes_of_a_row_do_not_depend_on_which_zero_comes_first():
    assert INT8.encode(rows_of([0.0, -0.0])).tobytes() == INT8.encode(rows_of([-0.0, 0.0])).tobytes() == bytes(10)


def test_the_layout_is_the_bytes_then_scale_and_bias():
    encoded = INT8.encode(rows_of([-1.0, 254.0, 0.0, 100.25]))
    assert encoded.shape == (1, 4 + 8)
    assert encoded[0, :4].tolist() == [0, 255, 1, 101]
    assert encoded[0, 4:].view("<f4").tolist() == [1.0, -1.0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_nan_in_8_bits(value):
    rows = rows_of([1, 2, 3], [1, value, 3], [4, 5, 6])
    decoded = INT8.decode(INT8.encode(rows))
    assert np.isnan(decoded[1]).all()
    assert np.isfinite(decoded[[0, 2]]).all()


def test_bytes_per_row():
    assert INT8.row_bytes(64) <= 0.30 * FLOAT32.row_bytes(64)
    assert BFLOAT16.row_bytes(64) == FLOAT32.row_bytes(64) / 2


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=lambda each: each.name)
def test_no_rows_are_no_rows(encoding):
    none = encoding.encode(np.zeros((0, 3), np.float32))
    assert none.shape == (0, encoding.width(3))
    assert encoding.decode(none).shape == (0, 3)


def test_bfloat16_is_that_of_ml_dtypes():
    import ml_dtypes  # jax needs it

    rows = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)
    wanted = rows.astype(ml_dtypes.bfloat16)
    assert BFLOAT16.encode(rows).tobytes() == wanted.tobytes()
    assert BFLOAT16.decode(BFLOAT16.encode(rows)).tobytes() == wanted.astype(np.float32).tobytes()
    assert BFLOAT16.as_values(BFLOAT16.encode(rows)).dtype == ml_dtypes.bfloat16


def test_rounding_to_the_nearest_is_that_of_ml_dtypes():
    import ml_dtypes  # jax needs it

    rng = np.random.default_rng(0)
    bits = np.concatenate(
        [rng.integers(0, 2**32, 50_000, np.uint32), np.arange(0x3F7F0000, 0x3F820000, 0x800, np.uint32)]
    )
    values = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        wanted = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    numbers = ~np.isnan(values)
    assert nearest(values)[numbers].tobytes() == wanted[numbers].tobytes()
    assert np.isnan(nearest(values)[~numbers]).all()


@pytest.mark.parametrize("name", ["int4", 8, None, ["int8"]])
def test_an_unknown_encoding_is_refused_by_name(name):
    with pytest.raises(UsageError, match="rows: expected float32, bfloat16, int8, got"):
        encoding_of(name)
