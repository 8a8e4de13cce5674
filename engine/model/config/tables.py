"""The table side of ``tf.tpu.experimental.embedding``: TableConfig, QuantizationConfig and initializers.

Constructors check the values that a user writes in Python as TensorFlow does. build.py converts them to a proto; this
module does not depend on protos or files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError
from penstock.model.config.dynamic import Dynamic
from penstock.model.config.placement import ON_DEVICES, Placement
from penstock.model.updates.rule import float32

COMBINERS = ("mean", "sum", "sqrtn")
DTYPES = ("float32", "bfloat16", "int32")
ON_GRADIENT = ("drop", "refuse")  # by the numbers of TableSettings.OnGradient


@dataclass(frozen=True)
class TruncatedNormal:
    """Initial values from a normal distribution, redrawn beyond two standard deviations from the mean.

    Parameters
    ----------
    mean, stddev : float
        Of the distribution before the redraws, rounded to float32.

    References
    ----------
    ``tf.compat.v1.truncated_normal_initializer``, TensorFlow's default for TPU embedding tables.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(1000, 16, ps.TruncatedNormal(0.0, 0.05), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table], optimizer=ps.SGD()), seed=7)
    >>> bool(abs(engine.lookup("user", range(1000))).max() <= 0.1)
    True
    """

    mean: float
    stddev: float


@dataclass(frozen=True)
class Uniform:
    """Initial values from the uniform distribution over [minimum, maximum).

    Parameters
    ----------
    minimum, maximum : float
        Rounded to float32.

    References
    ----------
    ``tf.random_uniform_initializer``

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(1000, 16, ps.Uniform(0.0, 0.5), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table], optimizer=ps.SGD()))
    >>> rows = engine.lookup("user", range(1000))
    >>> bool((rows >= 0).all() and (rows < 0.5).all())
    True
    """

    minimum: float
    maximum: float


@dataclass(frozen=True)
class Constant:
    """The same initial value in every element.

    Parameters
    ----------
    value : float
        Rounded to float32.

    References
    ----------
    ``tf.constant_initializer``

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(1000, 2, ps.Constant(0.5), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table], optimizer=ps.SGD()))
    >>> engine.lookup("user", [999])
    array([[0.5, 0.5]], dtype=float32)
    """

    value: float


@dataclass(frozen=True)
class RowIdInitializer:
    """The number of the row as the initial value of its elements: ``offset + i`` in row i.

    Parameters
    ----------
    offset : int
        The value of row 0.

    Notes
    -----
    Callable as in TensorFlow: (shape, dtype) -> numpy array of that shape.

    References
    ----------
    ``tf.tpu.experimental.embedding.RowIdInitializer``

    Examples
    --------
    >>> import penstock as ps
    >>> ps.RowIdInitializer(offset=10)((2, 3))
    array([[10., 10., 10.],
           [11., 11., 11.]], dtype=float32)
    """

    offset: int = 0

    def __call__(self, shape: Sequence[int], dtype: Any = "float32", **_: Any) -> npt.NDArray[Any]:
        rows, *rest = (int(dim) for dim in shape)
        column = np.arange(self.offset, self.offset + rows).astype(dtype_name(dtype))
        filled: npt.NDArray[Any] = np.broadcast_to(column.reshape(-1, *(1 for _ in rest)), (rows, *rest)).copy()
        return filled


@dataclass(frozen=True)
class FromFile:
    """The vector of each id or key in a file as its initial values; those without one start from zeros.

    Parameters
    ----------
    path : str
        A local file: Parquet as ``--out`` writes it (columns ``id`` and ``row``), or safetensors, torch or NumPy, of
        one tensor or one that is named like the table, whose row i belongs to id i. For a dynamic table, a file of
        tensors also has ``keys``. All vectors are finite float32.

    Raises
    ------
    ConfigError
        If ``path`` is empty, or no path.

    Notes
    -----
    The file is opened at each start, and commits have its digest: without the file, or with another, a start from a
    commit raises StateError.

    Examples
    --------
    >>> import numpy as np
    >>> import penstock as ps
    >>> np.save("vectors.npy", np.float32([[1.0, 2.0], [3.0, 4.0]]))
    >>> table = ps.TableConfig(3, 2, ps.FromFile("vectors.npy"), name="word", trainable=False)
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table], optimizer=ps.SGD()))
    >>> engine.lookup("word", [1, 2])
    array([[3., 4.],
           [0., 0.]], dtype=float32)
    """

    path: str

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise ConfigError(f"path must be that of a file of vectors, got {self.path!r}")
        object.__setattr__(self, "path", str(self.path))


Initializer = TruncatedNormal | Uniform | Constant | RowIdInitializer | FromFile
INITIALIZERS: dict[str, type[Initializer]] = {
    "truncated_normal": TruncatedNormal,
    "uniform": Uniform,
    "constant": Constant,
    "row_id": RowIdInitializer,
    "initial": FromFile,
}
"""By the member of ``TableSettings.initializer``, whose fields are the class's arguments in order."""


def default_initializer(dim: int) -> TruncatedNormal:
    """Return TensorFlow's default initializer: mean 0, standard deviation 1/sqrt(dim)."""
    return TruncatedNormal(0.0, float32(1.0 / math.sqrt(dim)))


@dataclass(eq=False)
class QuantizationConfig:
    """Simulated quantization of looked-up rows; the table itself stays float32.

    Parameters
    ----------
    num_buckets : int
        Number of levels, at least 2.
    lower, upper : float
        The lowest and the highest level; values beyond are clipped.

    Raises
    ------
    ConfigError
        If ``num_buckets`` is below 2.

    References
    ----------
    ``tf.tpu.experimental.embedding.QuantizationConfig``

    Examples
    --------
    >>> import penstock as ps
    >>> quantization = ps.QuantizationConfig(num_buckets=5, lower=-1.0, upper=1.0)
    >>> table = ps.TableConfig(8, 2, ps.Constant(0.3), quantization_config=quantization, name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table], optimizer=ps.SGD()))
    >>> engine.lookup("user", [5]), engine.lookup("user", [5], forward=True)
    (array([[0.3, 0.3]], dtype=float32), array([[0.5, 0.5]], dtype=float32))
    """

    num_buckets: int
    lower: float
    upper: float

    def __post_init__(self) -> None:
        if self.num_buckets < 2:
            raise ConfigError(f"num_buckets must be at least 2, got {self.num_buckets}")


@dataclass(eq=False)
class TableConfig:
    """One table. Equality is identity: two instances with the same content are two tables.

    Parameters
    ----------
    vocabulary_size : int
        Number of rows, at least 1; of a dynamic table, the number of keys that have a row at once.
    dim : int
        Number of float32 values per row, at least 1.
    initializer : TruncatedNormal, Uniform, Constant, RowIdInitializer, FromFile, callable or None
        The initial values. A callable is called as in TensorFlow, (shape, dtype) -> array, and cannot be saved with a
        configuration. None: ``TruncatedNormal(0, 1/sqrt(dim))``.
    optimizer : Optimizer or None
        None: that of the whole configuration.
    combiner : {"mean", "sum", "sqrtn"}
        How the rows of an example are combined in an activation.
    name : str or None
        None: ``table_<index>`` in the configuration that uses it.
    quantization_config : QuantizationConfig or None
        Simulated in forward passes.
    layout : object
        Accepted as in TensorFlow, where only SparseCore reads it.
    dtype : str or dtype
        "float32", "bfloat16" or "int32", or a numpy, jax or TensorFlow dtype of that name. bfloat16: weights of 16
        bits, which round stochastically (docs/devices.md); int32 is kept, and not updated.
    dynamic : Dynamic or None
        Ids are any 64-bit keys; None: ids are at least 0 and below ``vocabulary_size``.
    placement : Placement
        Where rows and slots lie (docs/placement.md).
    trainable : bool
        False: the table is frozen. It is never updated, and has no slots.
    on_gradient : {"drop", "refuse"}
        Of a frozen table: gradients for it are dropped, and counted as ``frozen:NAME``, or are an error.
    until_step : int or None
        Of a frozen table: it is trained from this global step on, at least 1, with new slots; None: never.

    Raises
    ------
    ConfigError
        If an argument is invalid.

    References
    ----------
    ``tf.tpu.experimental.embedding.TableConfig``; ``dynamic`` and what follows it are penstock's.

    Examples
    --------
    >>> import penstock as ps
    >>> user = ps.TableConfig(100_000, 32, name="user", optimizer=ps.Adagrad(0.05))
    >>> item = ps.TableConfig(5_000, 16, ps.Uniform(-0.1, 0.1), name="item", combiner="sum")
    >>> ps.EmbeddingConfig.from_tables([user, item], optimizer=ps.SGD(0.5))
    EmbeddingConfig(user 100000x32, item 5000x16)
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
    trainable: bool = True
    on_gradient: str = "drop"
    until_step: int | None = None

    def __post_init__(self) -> None:
        for argument, value in (("vocabulary_size", self.vocabulary_size), ("dim", self.dim)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{argument} must be an int of at least 1, got {value!r}")
        if self.initializer is None:
            self.initializer = default_initializer(self.dim)
        elif not callable(self.initializer) and not isinstance(self.initializer, get_args(Initializer)):
            raise ConfigError(
                f"initializer must be callable, a TruncatedNormal, Uniform, Constant or FromFile, or None, got "
                f"{self.initializer!r}"
            )
        if not isinstance(self.combiner, str) or self.combiner not in COMBINERS:
            raise ConfigError(f"combiner must be one of {', '.join(COMBINERS)}, got {self.combiner!r}")
        if self.dynamic is not None and not isinstance(self.dynamic, Dynamic):
            raise ConfigError(f"dynamic must be a Dynamic or None, got {self.dynamic!r}")
        if not isinstance(self.placement, Placement):
            raise ConfigError(f"placement must be a Placement, such as Placement('host'), got {self.placement!r}")
        if not isinstance(self.trainable, bool):
            raise ConfigError(f"trainable must be True or False, got {self.trainable!r}")
        if self.on_gradient not in ON_GRADIENT:
            raise ConfigError(f"on_gradient must be one of {', '.join(ON_GRADIENT)}, got {self.on_gradient!r}")
        if self.trainable and self.on_gradient != "drop":
            raise ConfigError("on_gradient is of a frozen table; set trainable=False, or remove it")
        if self.until_step is not None:
            if self.trainable:
                raise ConfigError("until_step is of a frozen table; set trainable=False, or remove it")
            if type(self.until_step) is not int or not 1 <= self.until_step < 1 << 63:
                raise ConfigError(f"until_step must be a step, at least 1, or None, got {self.until_step!r}")
        if dtype_name(self.dtype) not in DTYPES:
            raise ConfigError(f"dtype must be float32, bfloat16 or int32, got {self.dtype!r}")


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype given as a str, a numpy or TensorFlow dtype, or a scalar class."""
    for name in (getattr(dtype, "name", None), getattr(dtype, "__name__", None)):
        if isinstance(name, str):
            return name
    return str(dtype)
