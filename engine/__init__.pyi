"""The public names, one list for type checkers and for ``__init__.py``, which loads them on first use."""

from penstock import bridge as bridge, functional as functional, updates as updates
from penstock.accumulators import (
    ConditionalAccumulator as ConditionalAccumulator,
    SparseConditionalAccumulator as SparseConditionalAccumulator,
    SparseGradient as SparseGradient,
)
from penstock.activations.coo import CooIds as CooIds
from penstock.activations.deduplication import DeduplicationData as DeduplicationData
from penstock.checkpoint.versions import tag as tag
from penstock.config.dynamic import Dynamic as Dynamic
from penstock.config.embedding import EmbeddingConfig as EmbeddingConfig
from penstock.config.engine_config_pb2 import EngineConfig as EngineConfig
from penstock.config.features import FeatureConfig as FeatureConfig
from penstock.config.lint.findings import Finding as Finding
from penstock.config.placement import Placement as Placement
from penstock.config.tables import (
    Constant as Constant,
    QuantizationConfig as QuantizationConfig,
    RowIdInitializer as RowIdInitializer,
    TableConfig as TableConfig,
    TruncatedNormal as TruncatedNormal,
    Uniform as Uniform,
)
from penstock.dataflow import BlockStage as BlockStage, StageFunction as StageFunction, stage_fn as stage_fn
from penstock.engine import Engine as Engine
from penstock.io.decoding.string_ids import hash_ids as hash_ids
from penstock.errors import (
    CancelledError as CancelledError,
    CapacityError as CapacityError,
    ConfigError as ConfigError,
    DeltasGoneError as DeltasGoneError,
    InputError as InputError,
    PeerError as PeerError,
    PenstockError as PenstockError,
    ReadTimeoutError as ReadTimeoutError,
    ServiceError as ServiceError,
    ServiceTimeoutError as ServiceTimeoutError,
    StateError as StateError,
    TakeTimeoutError as TakeTimeoutError,
    TruncatedInputError as TruncatedInputError,
    UsageError as UsageError,
    UsageTypeError as UsageTypeError,
)
from penstock.io.flight import connect as connect
from penstock.shared.table_reader import Reader as Reader
from penstock.stats import Report as Report, TableReport as TableReport
from penstock.updates import DynamicLearningRate as DynamicLearningRate
from penstock.updates.adagrad_family import *  # noqa: F403
from penstock.updates.ftrl import *  # noqa: F403
from penstock.updates.moments import *  # noqa: F403
from penstock.updates.stateless import *  # noqa: F403

__version__: str
__all__: list[str]

def __dir__() -> list[str]: ...
