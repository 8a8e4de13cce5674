from penstock.config import tpu_embedding_configuration_pb2 as _tpu_embedding_configuration_pb2
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

class RowWiseAdagradParameters(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SlotSettings(_message.Message):
    __slots__ = ("name", "initial_value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INITIAL_VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    initial_value: float
    def __init__(self, name: _Optional[str] = ..., initial_value: _Optional[float] = ...) -> None: ...

class TableSettings(_message.Message):
    __slots__ = ("name", "truncated_normal", "uniform", "constant", "row_id", "slot", "storage_dtype", "row_wise_adagrad")
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
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_NORMAL_FIELD_NUMBER: _ClassVar[int]
    UNIFORM_FIELD_NUMBER: _ClassVar[int]
    CONSTANT_FIELD_NUMBER: _ClassVar[int]
    ROW_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STORAGE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROW_WISE_ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    name: str
    truncated_normal: TruncatedNormal
    uniform: Uniform
    constant: Constant
    row_id: RowId
    slot: _containers.RepeatedCompositeFieldContainer[SlotSettings]
    storage_dtype: TableSettings.StorageDtype
    row_wise_adagrad: RowWiseAdagradParameters
    def __init__(self, name: _Optional[str] = ..., truncated_normal: _Optional[_Union[TruncatedNormal, _Mapping[str, object]]] = ..., uniform: _Optional[_Union[Uniform, _Mapping[str, object]]] = ..., constant: _Optional[_Union[Constant, _Mapping[str, object]]] = ..., row_id: _Optional[_Union[RowId, _Mapping[str, object]]] = ..., slot: _Optional[_Iterable[_Union[SlotSettings, _Mapping[str, object]]]] = ..., storage_dtype: _Optional[_Union[TableSettings.StorageDtype, str]] = ..., row_wise_adagrad: _Optional[_Union[RowWiseAdagradParameters, _Mapping[str, object]]] = ...) -> None: ...

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
    __slots__ = ("num_required", "reduction")
    class Reduction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[GateSettings.Reduction]
        MEAN: _ClassVar[GateSettings.Reduction]
        SUM: _ClassVar[GateSettings.Reduction]
    UNSPECIFIED: GateSettings.Reduction
    MEAN: GateSettings.Reduction
    SUM: GateSettings.Reduction
    NUM_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    num_required: int
    reduction: GateSettings.Reduction
    def __init__(self, num_required: _Optional[int] = ..., reduction: _Optional[_Union[GateSettings.Reduction, str]] = ...) -> None: ...

class EngineConfig(_message.Message):
    __slots__ = ("tpu_embedding_configuration", "table", "feature", "gate")
    TPU_EMBEDDING_CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    tpu_embedding_configuration: _tpu_embedding_configuration_pb2.TPUEmbeddingConfiguration
    table: _containers.RepeatedCompositeFieldContainer[TableSettings]
    feature: _containers.RepeatedCompositeFieldContainer[FeatureSettings]
    gate: GateSettings
    def __init__(self, tpu_embedding_configuration: _Optional[_Union[_tpu_embedding_configuration_pb2.TPUEmbeddingConfiguration, _Mapping[str, object]]] = ..., table: _Optional[_Iterable[_Union[TableSettings, _Mapping[str, object]]]] = ..., feature: _Optional[_Iterable[_Union[FeatureSettings, _Mapping[str, object]]]] = ..., gate: _Optional[_Union[GateSettings, _Mapping[str, object]]] = ...) -> None: ...
