"""Random numbers that are the same on every machine: uniform, normal, and powers.

NumPy's normal, zipf and power call the C library's logarithm and exponential, whose last bit differs between libraries,
their versions and CPUs. Everything here is computed from the raw integers of PCG64, which NumPy guarantees, by
additions, subtractions, multiplications, divisions and square roots, which IEEE 754 rounds correctly, each by a
separate call of NumPy, so that no compiler fuses two of them. Sums are cumulative: ``np.sum`` may add in another order.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

E = 2.718281828459045
_LN_2 = 0.6931471805599453
_ROOT_HALF = 0.7071067811865476
_ROOT_2_PI = 2.5066282746310002
_UNIT = 1.1102230246251565e-16  # 2^-53
_LEAST_EXPONENT = -1022.0  # of a normal float64; smaller powers are 0
_CHUNK = 1 << 14  # values that are computed together, in the CPU's cache


class ExactDraws:
    """A stream of random numbers. Draws of n and then m numbers are those of n + m."""

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._bits = np.random.PCG64(seed)
        self._spare = np.zeros(0, np.uint32)

    def integers(self, count: int) -> npt.NDArray[np.uint64]:
        """Draw integers of 64 bits."""
        return self._bits.random_raw(count)

    def units(self, count: int) -> Float64:
        """Draw multiples of 2^-53 that are at least 0 and less than 1."""
        return (self.integers(count) >> np.uint64(11)).astype(np.float64) * np.float64(_UNIT)

    def below(self, bound: int, count: int) -> npt.NDArray[np.int64]:
        """Draw integers from 0 to bound - 1, at most 2^32: the product below is rounded to less than the bound."""
        return (self.units(count) * bound).astype(np.int64)

    def permutation(self, count: int) -> npt.NDArray[np.int64]:
        """Draw an order of the numbers below count."""
        return np.argsort(self.integers(count), kind="stable")

    def normals(self, count: int) -> npt.NDArray[np.float32]:
        """Draw from the standard normal distribution: sums of two of its 65,536 quantiles, divided by the root of 2.

        None is beyond 5.9.
        """
        words = self._integers_32(count).view("<u2")
        quantiles, values = _scaled_quantiles(), np.empty(count, np.float32)
        for first in range(0, count, _CHUNK):
            terms = quantiles.take(words[2 * first : 2 * (first + _CHUNK)])
            np.add(terms[::2], terms[1::2], out=values[first : first + _CHUNK])
        return values

    def _integers_32(self, count: int) -> npt.NDArray[np.uint32]:
        """Draw integers of 32 bits. The second half of a word waits for the next draw."""
        num_words = max(0, count - len(self._spare) + 1) // 2
        halves = self.integers(num_words).astype("<u8", copy=False).view("<u4")
        if len(self._spare):
            halves = np.concatenate([self._spare, halves])
        self._spare = halves[count:].copy()
        return halves[:count]


def power(base: Float64, exponent: Float64 | float) -> Float64:
    """Return base ** exponent to about 14 digits; base : positive. Results below 2^-1022 are 0."""
    mantissas, exponents = np.frexp(base)
    is_small = mantissas < _ROOT_HALF
    mantissas, exponents = np.where(is_small, 2.0 * mantissas, mantissas), exponents - is_small
    # log(m) = 2 (s + s^3/3 + s^5/5 + …) with s = (m - 1)/(m + 1), |s| < 0.172: the first omitted term is below 1e-19.
    s = (mantissas - 1.0) / (mantissas + 1.0)
    logarithms = 2.0 * s * _polynomial(s * s, [1.0 / (2 * i + 1) for i in range(11)])
    with np.errstate(over="ignore"):
        logarithms = (exponents + logarithms / _LN_2) * exponent
    logarithms = np.clip(logarithms, _LEAST_EXPONENT - 1.0, 1024.0)
    whole = np.rint(logarithms)
    x = (logarithms - whole) * _LN_2  # |x| < 0.347: the first omitted term of e^x is below 1e-17
    factorials = np.cumprod([1.0, *range(1, 14)])
    powers = np.ldexp(_polynomial(x, (1.0 / factorials).tolist()), whole.astype(np.int32))
    return np.where(logarithms < _LEAST_EXPONENT, 0.0, powers)


def _polynomial(x: Float64, coefficients: list[float]) -> Float64:
    """Return the sum of coefficients[i] * x^i, by Horner's rule."""
    total = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total *= x
        total += coefficient
    return total


@cache
def _scaled_quantiles() -> npt.NDArray[np.float32]:
    """Return the quantiles (k + 1/2) / 65,536 of the standard normal distribution, over √2: float32 (65536,).

    The density's integral from 0, by the trapezoidal rule, is inverted linearly between the points of a grid; both are
    exact to 1e-7.
    """
    width = 1.0 / 4096
    grid = np.arange(0.0, 4.5, width)  # the last quantile is 4.17
    density = power(np.array(E), grid * grid * -0.5)
    integral = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])  # times _ROOT_2_PI * 2 / width
    wanted = (np.arange(1 << 15) + 0.5) * (_ROOT_2_PI * 2.0 / width / (1 << 16))
    cells = np.searchsorted(integral, wanted, side="right") - 1
    rest = (wanted - integral[cells]) / (integral[cells + 1] - integral[cells])
    quantiles = (cells + rest) * width
    return (np.concatenate([-quantiles[::-1], quantiles]) * _ROOT_HALF).astype(np.float32)
