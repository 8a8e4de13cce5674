"""The table side of ``tf.tpu.experimental.embedding``: TableConfig, QuantizationConfig and initializers.

Constructors check the values that a user writes in Python as TensorFlow does. build.py converts them to a proto; this
module does not depend on protos or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from penstock.config.dynamic import Dynamic
from penstock.config.placement import ON_DEVICES, Placement
from penstock.errors import ConfigError
from penstock.updates.rule import float32

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
INITIALIZERS: dict[str, type[Initializer]] = {
    "truncated_normal": TruncatedNormal,
    "uniform": Uniform,
    "constant": Constant,
    "row_id": RowIdInitializer,
}
"""By the member of ``TableSettings.initializer``, whose fields are the class's arguments in order."""


def default_initializer(dim: int) -> TruncatedNormal:
    """Return TensorFlow's default initializer: mean 0, standard deviation 1/sqrt(dim)."""
    return TruncatedNormal(0.0, float32(1.0 / math.sqrt(dim)))


@dataclass(eq=False)
class QuantizationConfig:
    """Quantization of looked-up rows to ``num_buckets`` levels in [lower, upper]; the table itself stays float32."""

    num_buckets: int
    lower: float
    upper: float

    def __post_init__(self) -> None:
        if self.num_buckets < 2:
            raise ConfigError(f"num_buckets must be at least 2, got {self.num_buckets}")


@dataclass(eq=False)
class TableConfig:
    """One table. Equality is identity: two instances with the same content are two tables.

    initializer : a callable (shape, dtype) -> array as in TensorFlow, an ``Initializer`` value, or None for the
        default. Only values can be saved with a configuration.
    optimizer : an optimizer, or None for that of the whole configuration
    name : None names it ``table_<index>`` in the configuration that uses it
    layout : accepted as in TensorFlow, where only SparseCore reads it
    dtype : "float32" or "int32", or a numpy, jax or TensorFlow dtype of that name
    dynamic : ids are any 64-bit keys, of which vocabulary_size have a row at once; None: ids are below vocabulary_size
    placement : where rows and slots lie (docs/placement.md)
    """

    vocabulary_size: int
    dim: int
    initializer: Callable[..., Any] | Initializer | None = field(default=None, repr=False)
    optimizer: Any = None
    combiner: str = "mean"
    name: str | None = None
    quantization_config: QuantizationConfig | None = field(default=None, repr=False)
    layout: Any = field(default=None, repr=False)
    dtype: Any = field(default="float32", repr=False)
    dynamic: Dynamic | None = None
    placement: Placement = ON_DEVICES

    def __post_init__(self) -> None:
        for argument, value in (("vocabulary_size", self.vocabulary_size), ("dim", self.dim)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{argument} must be an int of at least 1, got {value!r}")
        if self.initializer is None:
            self.initializer = default_initializer(self.dim)
        elif not callable(self.initializer) and not isinstance(self.initializer, get_args(Initializer)):
            raise ConfigError(
                f"initializer must be callable, a TruncatedNormal, Uniform or Constant, or None, got "
                f"{self.initializer!r}"
            )
        if not isinstance(self.combiner, str) or self.combiner not in COMBINERS:
            raise ConfigError(f"combiner must be one of {', '.join(COMBINERS)}, got {self.combiner!r}")
        if self.dynamic is not None and not isinstance(self.dynamic, Dynamic):
            raise ConfigError(f"dynamic must be a Dynamic or None, got {self.dynamic!r}")
        if not isinstance(self.placement, Placement):
            raise ConfigError(f"placement must be a Placement, such as Placement('host'), got {self.placement!r}")
        if dtype_name(self.dtype) not in ("float32", "int32"):
            raise ConfigError(f"dtype must be float32 or int32, got {self.dtype!r}")


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype given as a str, a numpy or TensorFlow dtype, or a scalar class."""
    for name in (getattr(dtype, "name", None), getattr(dtype, "__name__", None)):
        if isinstance(name, str):
            return name
    return str(dtype)
