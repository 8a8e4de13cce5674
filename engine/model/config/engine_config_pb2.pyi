from penstock.model.config import tpu_embedding_configuration_pb2 as _tpu_embedding_configuration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TruncatedNormal(_message.Message):
    __slots__ = ("mean", "stddev")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STDDEV_FIELD_NUMBER: _ClassVar[int]
    mean: float
    stddev: float
    def __init__(self, mean: _Optional[float] = ..., stddev: _Optional[float] = ...) -> None: ...

class Uniform(_message.Message):
    __slots__ = ("min", "max")
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    min: float
    max: float
    def __init__(self, min: _Optional[float] = ..., max: _Optional[float] = ...) -> None: ...

class Constant(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class RowId(_message.Message):
    __slots__ = ("offset",)
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    offset: int
    def __init__(self, offset: _Optional[int] = ...) -> None: ...

class Initial(_message.Message):
    __slots__ = ()
    FROM_FIELD_NUMBER: _ClassVar[int]
    def __init__(self, **kwargs: object) -> None: ...

class RowWiseAdagradParameters(_message.Message):
    __slots__ = ("epsilon",)
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    epsilon: float
    def __init__(self, epsilon: _Optional[float] = ...) -> None: ...

class TorchAdagradParameters(_message.Message):
    __slots__ = ("epsilon", "lr_decay")
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    LR_DECAY_FIELD_NUMBER: _ClassVar[int]
    epsilon: float
    lr_decay: float
    def __init__(self, epsilon: _Optional[float] = ..., lr_decay: _Optional[float] = ...) -> None: ...

class PartialRowWiseAdamParameters(_message.Message):
    __slots__ = ("beta1", "beta2", "epsilon")
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    beta1: float
    beta2: float
    epsilon: float
    def __init__(self, beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., epsilon: _Optional[float] = ...) -> None: ...

class SlotSettings(_message.Message):
    __slots__ = ("name", "initial_value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INITIAL_VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    initial_value: float
    def __init__(self, name: _Optional[str] = ..., initial_value: _Optional[float] = ...) -> None: ...

class DynamicSettings(_message.Message):
    __slots__ = ("key_type", "admit", "expire", "evict", "on_full", "missing")
    class KeyType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        INT64: _ClassVar[DynamicSettings.KeyType]
        UINT64: _ClassVar[DynamicSettings.KeyType]
    INT64: DynamicSettings.KeyType
    UINT64: DynamicSettings.KeyType
    class OnFull(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ERROR: _ClassVar[DynamicSettings.OnFull]
        REJECT: _ClassVar[DynamicSettings.OnFull]
    ERROR: DynamicSettings.OnFull
    REJECT: DynamicSettings.OnFull
    class Missing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        INITIAL: _ClassVar[DynamicSettings.Missing]
        ZERO: _ClassVar[DynamicSettings.Missing]
    INITIAL: DynamicSettings.Missing
    ZERO: DynamicSettings.Missing
    class Admit(_message.Message):
        __slots__ = ("min_count", "count", "forget_after", "probability")
        class Count(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
            __slots__ = ()
            ROWS: _ClassVar[DynamicSettings.Admit.Count]
            FRAMES: _ClassVar[DynamicSettings.Admit.Count]
        ROWS: DynamicSettings.Admit.Count
        FRAMES: DynamicSettings.Admit.Count
        MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
        COUNT_FIELD_NUMBER: _ClassVar[int]
        FORGET_AFTER_FIELD_NUMBER: _ClassVar[int]
        PROBABILITY_FIELD_NUMBER: _ClassVar[int]
        min_count: int
        count: DynamicSettings.Admit.Count
        forget_after: int
        probability: float
        def __init__(self, min_count: _Optional[int] = ..., count: _Optional[_Union[DynamicSettings.Admit.Count, str]] = ..., forget_after: _Optional[int] = ..., probability: _Optional[float] = ...) -> None: ...
    class Expire(_message.Message):
        __slots__ = ("after", "clock")
        class Clock(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
            __slots__ = ()
            STEPS: _ClassVar[DynamicSettings.Expire.Clock]
            TIME: _ClassVar[DynamicSettings.Expire.Clock]
        STEPS: DynamicSettings.Expire.Clock
        TIME: DynamicSettings.Expire.Clock
        AFTER_FIELD_NUMBER: _ClassVar[int]
        CLOCK_FIELD_NUMBER: _ClassVar[int]
        after: int
        clock: DynamicSettings.Expire.Clock
        def __init__(self, after: _Optional[int] = ..., clock: _Optional[_Union[DynamicSettings.Expire.Clock, str]] = ...) -> None: ...
    class Evict(_message.Message):
        __slots__ = ("by", "half_life")
        class By(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
            __slots__ = ()
            LRU: _ClassVar[DynamicSettings.Evict.By]
            LFU: _ClassVar[DynamicSettings.Evict.By]
        LRU: DynamicSettings.Evict.By
        LFU: DynamicSettings.Evict.By
        BY_FIELD_NUMBER: _ClassVar[int]
        HALF_LIFE_FIELD_NUMBER: _ClassVar[int]
        by: DynamicSettings.Evict.By
        half_life: int
        def __init__(self, by: _Optional[_Union[DynamicSettings.Evict.By, str]] = ..., half_life: _Optional[int] = ...) -> None: ...
    KEY_TYPE_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    ON_FULL_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    key_type: DynamicSettings.KeyType
    admit: DynamicSettings.Admit
    expire: DynamicSettings.Expire
    evict: DynamicSettings.Evict
    on_full: DynamicSettings.OnFull
    missing: DynamicSettings.Missing
    def __init__(self, key_type: _Optional[_Union[DynamicSettings.KeyType, str]] = ..., admit: _Optional[_Union[DynamicSettings.Admit, _Mapping[str, object]]] = ..., expire: _Optional[_Union[DynamicSettings.Expire, _Mapping[str, object]]] = ..., evict: _Optional[_Union[DynamicSettings.Evict, _Mapping[str, object]]] = ..., on_full: _Optional[_Union[DynamicSettings.OnFull, str]] = ..., missing: _Optional[_Union[DynamicSettings.Missing, str]] = ...) -> None: ...

class PlacementSettings(_message.Message):
    __slots__ = ("where", "device_bytes", "look_ahead")
    class Where(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DEVICE: _ClassVar[PlacementSettings.Where]
        HOST: _ClassVar[PlacementSettings.Where]
        CACHED: _ClassVar[PlacementSettings.Where]
    DEVICE: PlacementSettings.Where
    HOST: PlacementSettings.Where
    CACHED: PlacementSettings.Where
    WHERE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOOK_AHEAD_FIELD_NUMBER: _ClassVar[int]
    where: PlacementSettings.Where
    device_bytes: int
    look_ahead: int
    def __init__(self, where: _Optional[_Union[PlacementSettings.Where, str]] = ..., device_bytes: _Optional[int] = ..., look_ahead: _Optional[int] = ...) -> None: ...

class TableSettings(_message.Message):
    __slots__ = ("name", "truncated_normal", "uniform", "constant", "row_id", "initial", "slot", "storage_dtype", "dynamic", "placement", "trainable", "on_gradient", "until_step", "row_wise_adagrad", "torch_adagrad", "partial_row_wise_adam")
    class StorageDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[TableSettings.StorageDtype]
        FLOAT32: _ClassVar[TableSettings.StorageDtype]
        BFLOAT16: _ClassVar[TableSettings.StorageDtype]
        INT32: _ClassVar[TableSettings.StorageDtype]
    UNSPECIFIED: TableSettings.StorageDtype
    FLOAT32: TableSettings.StorageDtype
    BFLOAT16: TableSettings.StorageDtype
    INT32: TableSettings.StorageDtype
    class OnGradient(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DROP: _ClassVar[TableSettings.OnGradient]
        REFUSE: _ClassVar[TableSettings.OnGradient]
    DROP: TableSettings.OnGradient
    REFUSE: TableSettings.OnGradient
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_NORMAL_FIELD_NUMBER: _ClassVar[int]
    UNIFORM_FIELD_NUMBER: _ClassVar[int]
    CONSTANT_FIELD_NUMBER: _ClassVar[int]
    ROW_ID_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STORAGE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    ON_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    UNTIL_STEP_FIELD_NUMBER: _ClassVar[int]
    ROW_WISE_ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    TORCH_ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_ROW_WISE_ADAM_FIELD_NUMBER: _ClassVar[int]
    name: str
    truncated_normal: TruncatedNormal
    uniform: Uniform
    constant: Constant
    row_id: RowId
    initial: Initial
    slot: _containers.RepeatedCompositeFieldContainer[SlotSettings]
    storage_dtype: TableSettings.StorageDtype
    dynamic: DynamicSettings
    placement: PlacementSettings
    trainable: bool
    on_gradient: TableSettings.OnGradient
    until_step: int
    row_wise_adagrad: RowWiseAdagradParameters
    torch_adagrad: TorchAdagradParameters
    partial_row_wise_adam: PartialRowWiseAdamParameters
    def __init__(self, name: _Optional[str] = ..., truncated_normal: _Optional[_Union[TruncatedNormal, _Mapping[str, object]]] = ..., uniform: _Optional[_Union[Uniform, _Mapping[str, object]]] = ..., constant: _Optional[_Union[Constant, _Mapping[str, object]]] = ..., row_id: _Optional[_Union[RowId, _Mapping[str, object]]] = ..., initial: _Optional[_Union[Initial, _Mapping[str, object]]] = ..., slot: _Optional[_Iterable[_Union[SlotSettings, _Mapping[str, object]]]] = ..., storage_dtype: _Optional[_Union[TableSettings.StorageDtype, str]] = ..., dynamic: _Optional[_Union[DynamicSettings, _Mapping[str, object]]] = ..., placement: _Optional[_Union[PlacementSettings, _Mapping[str, object]]] = ..., trainable: bool = ..., on_gradient: _Optional[_Union[TableSettings.OnGradient, str]] = ..., until_step: _Optional[int] = ..., row_wise_adagrad: _Optional[_Union[RowWiseAdagradParameters, _Mapping[str, object]]] = ..., torch_adagrad: _Optional[_Union[TorchAdagradParameters, _Mapping[str, object]]] = ..., partial_row_wise_adam: _Optional[_Union[PartialRowWiseAdamParameters, _Mapping[str, object]]] = ...) -> None: ...

class FeatureSettings(_message.Message):
    __slots__ = ("name", "combiner", "max_sequence_length", "feature_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMBINER_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FEATURE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    combiner: str
    max_sequence_length: int
    feature_id: int
    def __init__(self, name: _Optional[str] = ..., combiner: _Optional[str] = ..., max_sequence_length: _Optional[int] = ..., feature_id: _Optional[int] = ...) -> None: ...

class GateSettings(_message.Message):
    __slots__ = ("num_required", "reduction", "max_staleness", "rounds")
    class Reduction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[GateSettings.Reduction]
        MEAN: _ClassVar[GateSettings.Reduction]
        SUM: _ClassVar[GateSettings.Reduction]
    UNSPECIFIED: GateSettings.Reduction
    MEAN: GateSettings.Reduction
    SUM: GateSettings.Reduction
    class Rounds(_message.Message):
        __slots__ = ("workers", "names", "ahead")
        WORKERS_FIELD_NUMBER: _ClassVar[int]
        NAMES_FIELD_NUMBER: _ClassVar[int]
        AHEAD_FIELD_NUMBER: _ClassVar[int]
        workers: int
        names: _containers.RepeatedScalarFieldContainer[str]
        ahead: int
        def __init__(self, workers: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., ahead: _Optional[int] = ...) -> None: ...
    NUM_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    num_required: int
    reduction: GateSettings.Reduction
    max_staleness: int
    rounds: GateSettings.Rounds
    def __init__(self, num_required: _Optional[int] = ..., reduction: _Optional[_Union[GateSettings.Reduction, str]] = ..., max_staleness: _Optional[int] = ..., rounds: _Optional[_Union[GateSettings.Rounds, _Mapping[str, object]]] = ...) -> None: ...

class ClipSettings(_message.Message):
    __slots__ = ("global_norm", "row_norm")
    GLOBAL_NORM_FIELD_NUMBER: _ClassVar[int]
    ROW_NORM_FIELD_NUMBER: _ClassVar[int]
    global_norm: float
    row_norm: float
    def __init__(self, global_norm: _Optional[float] = ..., row_norm: _Optional[float] = ...) -> None: ...

class LimitSettings(_message.Message):
    __slots__ = ("contributor_norm", "action")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CLIP: _ClassVar[LimitSettings.Action]
        QUARANTINE: _ClassVar[LimitSettings.Action]
    CLIP: LimitSettings.Action
    QUARANTINE: LimitSettings.Action
    CONTRIBUTOR_NORM_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    contributor_norm: float
    action: LimitSettings.Action
    def __init__(self, contributor_norm: _Optional[float] = ..., action: _Optional[_Union[LimitSettings.Action, str]] = ...) -> None: ...

class ColumnSettings(_message.Message):
    __slots__ = ("role", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class EngineConfig(_message.Message):
    __slots__ = ("tpu_embedding_configuration", "table", "feature", "gate", "columns", "clip", "limit")
    TPU_EMBEDDING_CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    tpu_embedding_configuration: _tpu_embedding_configuration_pb2.TPUEmbeddingConfiguration
    table: _containers.RepeatedCompositeFieldContainer[TableSettings]
    feature: _containers.RepeatedCompositeFieldContainer[FeatureSettings]
    gate: GateSettings
    columns: _containers.RepeatedCompositeFieldContainer[ColumnSettings]
    clip: ClipSettings
    limit: LimitSettings
    def __init__(self, tpu_embedding_configuration: _Optional[_Union[_tpu_embedding_configuration_pb2.TPUEmbeddingConfiguration, _Mapping[str, object]]] = ..., table: _Optional[_Iterable[_Union[TableSettings, _Mapping[str, object]]]] = ..., feature: _Optional[_Iterable[_Union[FeatureSettings, _Mapping[str, object]]]] = ..., gate: _Optional[_Union[GateSettings, _Mapping[str, object]]] = ..., columns: _Optional[_Iterable[_Union[ColumnSettings, _Mapping[str, object]]]] = ..., clip: _Optional[_Union[ClipSettings, _Mapping[str, object]]] = ..., limit: _Optional[_Union[LimitSettings, _Mapping[str, object]]] = ...) -> None: ...
