"""The optimizer and table classes: TensorFlow's defaults, validation and equality, and the update rule they mean."""

import math

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.optimizer_protos import optimization_parameters
from penstock.model.config.tables import QuantizationConfig, TableConfig, TruncatedNormal
from penstock.model.updates import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    OnlineYogi,
    RowWiseAdagrad,
    UpdateRule,
    update_rule,
)


def through_proto(optimizer):
    """The optimizer as it comes back from the message of a table."""
    config = EmbeddingConfig.from_tables([TableConfig(10, 4, name="a")], optimizer)
    return EmbeddingConfig.from_proto(config.to_engine_proto()).optimizer("a")


def test_a_scalar_clipvalue_equals_its_symmetric_pair():
    assert SGD(clipvalue=1.0) == SGD(clipvalue=(-1.0, 1.0))
    assert hash(SGD(clipvalue=1.0)) == hash(SGD(clipvalue=(-1.0, 1.0)))


def test_a_negative_clipvalue_is_taken_as_it_comes():
    assert (SGD(clipvalue=-3).clip_gradient_min, SGD(clipvalue=-3).clip_gradient_max) == (3.0, -3)


def test_optimizers_of_different_classes_differ():
    assert SGD(learning_rate=0.1) != Adagrad(learning_rate=0.1)


def test_nan_learning_rates_are_unequal():
    assert SGD(float("nan")) != SGD(-math.nan)


def test_none_and_false_flags_differ():
    assert SGD() != SGD(multiply_weight_decay_factor_by_learning_rate=False)


def test_clipvalue_without_accumulation_is_refused():
    with pytest.raises(ConfigError, match="clipvalue needs use_gradient_accumulation=True"):
        SGD(clipvalue=0, use_gradient_accumulation=False)


def test_a_list_as_clipvalue_is_a_type_error():
    with pytest.raises(TypeError, match=r"a tuple \(lower, upper\), got \[-1.0, 1.0\]"):
        SGD(clipvalue=[-1.0, 1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["x", None, [0.1], "0.1"])
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (Adagrad, "initial_accumulator_value"),
        (FTRL, "initial_accumulator_value"),
        (RowWiseAdagrad, "initial_accumulator_value"),
        (AdagradMomentum, "epsilon"),
        (AdagradMomentum, "exponent"),
        (Adam, "beta_1"),
        (Adam, "beta_2"),
        (Adam, "epsilon"),
        (OnlineYogi, "l1"),
    ],
)
def test_a_non_numeric_argument_is_a_type_error_that_names_it(optimizer, name, wrong):
    with pytest.raises(TypeError, match=f"^{name} must be a number, got "):
        optimizer(**{name: wrong})


def test_a_slot_creation_function_must_be_callable():
    with pytest.raises(ConfigError, match="slot_variable_creation_fn must be callable"):
        Adagrad(slot_variable_creation_fn=3)  # type: ignore[arg-type]


def test_a_clip_bound_of_zero_is_written():
    limits = optimization_parameters(SGD(clipvalue=0), None).gradient_clipping_limits
    assert limits.HasField("lower")
    assert limits.HasField("upper")
    assert math.copysign(1, limits.lower.value) == -1


def test_the_multiply_flag_is_written_only_with_a_factor():
    alone = SGD(multiply_weight_decay_factor_by_learning_rate=True)
    assert not optimization_parameters(alone, None).multiply_weight_decay_factor_by_learning_rate


def test_python_bools_of_the_packing_status_are_accepted():
    assert optimization_parameters(SGD(low_dimensional_packing_status=True), None).low_dimensional_packing_status == 1
    assert optimization_parameters(SGD(), None).low_dimensional_packing_status == 0


def test_a_rule_is_float32_whether_from_python_or_from_a_proto():
    optimizer = Adagrad(0.1, clip_weight_max=0.1, weight_decay_factor=0.7, clipvalue=0.3)
    rule = update_rule(optimizer)
    assert rule == update_rule(through_proto(optimizer))
    assert rule.weight_decay == float(np.float32(0.7))
    assert (rule.gradient_min, rule.gradient_max) == (float(np.float32(-0.3)), float(np.float32(0.3)))


def test_bounds_that_clip_nothing_are_open():
    optimizer = SGD(clip_weight_min=-math.inf, clip_weight_max=1e300)
    assert update_rule(optimizer) == UpdateRule("stochastic_gradient_descent", 0)


def test_the_default_start_is_tensorflows():
    assert TableConfig(10, 16).initializer == TruncatedNormal(0.0, 0.25)


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32"), np.int32])
def test_dtypes_are_known_by_their_name(dtype):
    TableConfig(10, 4, dtype=dtype)


def test_tables_with_the_same_content_are_two_tables():
    assert TableConfig(10, 4, name="a") != TableConfig(10, 4, name="a")


def test_a_quantization_needs_two_buckets():
    with pytest.raises(ConfigError, match="num_buckets must be at least 2, got 1"):
        QuantizationConfig(1, 0.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"vocabulary_size": 0}, "vocabulary_size must be an int of at least 1, got 0"),
        ({"vocabulary_size": 4.0}, "vocabulary_size must be an int of at least 1, got 4.0"),
        ({"dim": 0}, "dim must be an int of at least 1, got 0"),
        ({"initializer": 3}, "initializer must be callable"),
        ({"combiner": "max"}, "combiner must be one of mean, sum, sqrtn, got 'max'"),
        ({"combiner": None}, "combiner must be one of"),
        ({"dtype": "float64"}, "dtype must be float32, bfloat16 or int32, got 'float64'"),
    ],
)
def test_wrong_table_arguments_are_refused(arguments, match):
    with pytest.raises(ConfigError, match=match):
        TableConfig(**{"vocabulary_size": 10, "dim": 4, **arguments})
