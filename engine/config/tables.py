"""The table side of ``tf.tpu.experimental.embedding``: TableConfig, QuantizationConfig and initializers.

Constructors check the values that a user writes in Python as TensorFlow does. build.py converts them to a proto; this
module does not depend on protos or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from penstock.config.optimizers.float32 import float32
from penstock.errors import ConfigError

COMBINERS = ("mean", "sum", "sqrtn")


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal, redrawn beyond two standard deviations from the mean. Numbers are float32."""

    mean: float
    stddev: float


@dataclass(frozen=True)
class Uniform:
    """Uniform over [minimum, maximum). Numbers are float32."""

    minimum: float
    maximum: float


@dataclass(frozen=True)
class Constant:
    """The same float32 value in every element."""

    value: float


@dataclass(frozen=True)
class RowIdInitializer:
    """offset + i in every element of row i. Callable as in TensorFlow: (shape, dtype) -> numpy array of that shape."""

    offset: int = 0

    def __call__(self, shape: Sequence[int], dtype: Any = "float32", **_: Any) -> npt.NDArray[Any]:
        rows, *rest = (int(dim) for dim in shape)
        column = np.arange(self.offset, self.offset + rows).astype(dtype_name(dtype))
        filled: npt.NDArray[Any] = np.broadcast_to(column.reshape(-1, *(1 for _ in rest)), (rows, *rest)).copy()
        return filled


Initializer = TruncatedNormal | Uniform | Constant | RowIdInitializer


def default_initializer(dim: int) -> TruncatedNormal:
    """Return TensorFlow's default initializer: mean 0, standard deviation 1/sqrt(dim)."""
    return TruncatedNormal(0.0, float32(1.0 / math.sqrt(dim)))


class QuantizationConfig:
    """Quantization of looked-up rows to ``num_buckets`` levels in [lower, upper]; the table itself stays float32."""

    def __init__(self, num_buckets: int, lower: float, upper: float) -> None:
        if num_buckets < 2:
            raise ConfigError(f"num_buckets must be at least 2, got {num_buckets}")
        self.num_buckets = num_buckets
        self.lower = lower
        self.upper = upper

    def __repr__(self) -> str:
        return f"QuantizationConfig(num_buckets={self.num_buckets}, lower={self.lower}, upper={self.upper})"


class TableConfig:
    """One table. Equality is identity: two instances with the same content are two tables.

    initializer : a callable (shape, dtype) -> array as in TensorFlow, an ``Initializer`` value, or None for the
        default. Only values can be saved with a configuration.
    optimizer : an optimizer, or None for that of the whole configuration
    name : None names it ``table_<index>`` in the configuration that uses it
    layout : accepted as in TensorFlow, where only SparseCore reads it
    dtype : "float32" or "int32", or a numpy, jax or TensorFlow dtype of that name
    """

    def __init__(
        self,
        vocabulary_size: int,
        dim: int,
        initializer: Callable[..., Any] | Initializer | None = None,
        optimizer: Any = None,
        combiner: str = "mean",
        name: str | None = None,
        quantization_config: QuantizationConfig | None = None,
        layout: Any = None,
        dtype: Any = "float32",
    ) -> None:
        for what, value in (("vocabulary_size", vocabulary_size), ("dim", dim)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{what} must be an int of at least 1, got {value!r}")
        if initializer is not None and not callable(initializer) and not isinstance(initializer, get_args(Initializer)):
            raise ConfigError(
                f"initializer must be callable, a TruncatedNormal, Uniform or Constant, or None, got {initializer!r}"
            )
        if not isinstance(combiner, str) or combiner not in COMBINERS:
            raise ConfigError(f"combiner must be one of {', '.join(COMBINERS)}, got {combiner!r}")
        if dtype_name(dtype) not in ("float32", "int32"):
            raise ConfigError(f"dtype must be float32 or int32, got {dtype!r}")
        self.vocabulary_size = vocabulary_size
        self.dim = dim
        self.initializer = default_initializer(dim) if initializer is None else initializer
        self.optimizer = optimizer
        self.combiner = combiner
        self.name = name
        self.quantization_config = quantization_config
        self.layout = layout
        self.dtype = dtype

    def __repr__(self) -> str:
        return (
            f"TableConfig(vocabulary_size={self.vocabulary_size}, dim={self.dim}, optimizer={self.optimizer!r}, "
            f"combiner={self.combiner!r}, name={self.name!r})"
        )


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype given as a str, a numpy or TensorFlow dtype, or a scalar class."""
    for name in (getattr(dtype, "name", None), getattr(dtype, "__name__", None)):
        if isinstance(name, str):
            return name
    return str(dtype)
