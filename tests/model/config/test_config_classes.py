"""Every optimizer class: what it refuses, its slots, its way through a message and a file, and the rule it means."""

import dataclasses
import math
from functools import partial
from typing import Any

import engines
import numpy as np
import pytest

import penstock
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.optimization_parameters_pb2 import OptimizationParameters
from penstock.model.config.optimizer_protos import optimization_parameters
from penstock.model.config.tables import Constant, RowIdInitializer
from penstock.model.updates import OPTIMIZERS, OWN_OPTIMIZERS, UPDATES, WITHOUT_FORMULA, UserDefinedProgram, update_rule


def halve(gradient, weights, *slots):
    return (weights - gradient / 2, *slots)


def made(name, **arguments):
    """An instance of the class of algorithm ``name``."""
    cls = OPTIMIZERS[name]
    return cls(halve, **arguments) if cls is UserDefinedProgram else cls(**arguments)


config_of = partial(engines.config_of, tables="a", dim=4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_class_is_public_and_has_a_member_in_a_message(name):
    assert getattr(penstock, OPTIMIZERS[name].__name__) is OPTIMIZERS[name]
    assert (name in OptimizationParameters.DESCRIPTOR.fields_by_name) == (name not in OWN_OPTIMIZERS)


def test_every_member_of_tensorflows_message_has_a_class():
    members = {field.name for field in OptimizationParameters.DESCRIPTOR.oneofs_by_name["parameters"].fields}
    assert members == OPTIMIZERS.keys() - OWN_OPTIMIZERS


def test_every_class_but_those_without_a_formula_has_an_equation():
    assert UPDATES.keys() == OPTIMIZERS.keys() - WITHOUT_FORMULA


# Slots with their initial values: TensorFlow's classes where there are some, else TensorFlow 1's padding rows.
SLOTS = {
    "stochastic_gradient_descent": {},
    "adagrad": {"accumulators": 0.1},
    "adagrad_momentum": {"accumulators": 0.0, "momenta": 0.0},
    "ftrl": {"accumulators": 0.1, "linears": 0.0},
    "adam": {"momenta": 0.0, "velocities": 0.0},
    "momentum": {"momenta": 0.0},
    "lion": {"momenta": 0.0},
    "rms_prop": {"ms": 1.0, "mom": 0.0},
    "centered_rms_prop": {"ms": 1.0, "mom": 0.0, "mg": 0.0},
    "adadelta": {"accumulators": 0.0, "updates": 0.0},
    "proximal_adagrad": {"accumulators": 0.1},
    "bounded_adagrad": {"accumulators": 0.1},
    "online_yogi": {"vs": 0.1, "linears": 0.0},
    "proximal_yogi": {"v": 0.1, "m": 0.0},
    "frequency_estimator": {"last_hit_step": 0.0},
    "assign": {},
    "user_defined_program": {},
    "mdl_adagrad_light": {"accumulators": 0.1, "weights": 0.0, "benefits": 0.0},
    "frequency_aware_adagrad": {"accumulators": 0.0, "counters": 0.0},
    "row_wise_adagrad": {"accumulators": 0.1},
    "torch_adagrad": {"sum": 0.0},
    "partial_row_wise_adam": {"exp_avg": 0.0, "exp_avg_sq": 0.0},
}


def test_the_slots_of_every_optimizer_of_tensorflow_are_listed():
    assert OPTIMIZERS.keys() - OWN_OPTIMIZERS <= SLOTS.keys()


@pytest.mark.parametrize("name", SLOTS)
def test_slots_stand_in_tensorflows_order_with_their_initial_values(name):
    assert list(made(name).slots()) == list(SLOTS[name].items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_switch_that_all_have_reaches_the_rule(name):
    optimizer = made(
        name,
        clip_weight_min=-1.0,
        clip_weight_max=2.0,
        weight_decay_factor=0.5,
        multiply_weight_decay_factor_by_learning_rate=True,
        clipvalue=(None, 0.25),
    )
    rule = update_rule(optimizer)
    assert (rule.weight_min, rule.weight_max) == (-1.0, 2.0)
    assert (rule.weight_decay, rule.decay_times_learning_rate) == (0.5, True)
    assert (rule.gradient_min, rule.gradient_max) == (None, 0.25)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - OWN_OPTIMIZERS - {"user_defined_program"}))
def test_every_field_of_the_message_reaches_the_class_and_the_rule(name):
    """Numbers of their own in all fields come back from the class, and from the rule where the update reads them."""
    parameters = OptimizationParameters()
    parameters.learning_rate.constant = 0.5
    own = getattr(parameters, name)
    own.SetInParent()
    fields = OPTIMIZERS[name].fields()
    for index, (field, switch) in enumerate(fields.items()):
        setattr(own, field, True if switch else 0.25 + index / 64)
    config = config_of(made("assign")).to_proto()
    config.table_descriptor[0].optimization_parameters.CopyFrom(parameters)
    optimizer = EmbeddingConfig.from_proto(config).optimizer("a")
    assert optimizer.proto_values() == {field: getattr(own, field) for field in fields}
    written = OptimizationParameters()
    optimizer.write_parameters(written)
    assert getattr(written, name) == own
    hyper = dict(update_rule(optimizer).hyper)
    assert hyper == {f: getattr(own, f) for f in fields if f not in optimizer.not_in_equation}


@pytest.mark.parametrize(
    ("algorithm", "switch"), [("adam", {"lazy_adam": False}), ("lion", {"use_non_lazy_lion": True})]
)
def test_non_lazy_updates_are_of_the_rule_and_need_accumulation(algorithm, switch):
    assert update_rule(made(algorithm, **switch)).non_lazy
    assert not update_rule(made(algorithm)).non_lazy
    with pytest.raises(penstock.ConfigError, match="needs use_gradient_accumulation=True"):
        made(algorithm, **switch, use_gradient_accumulation=False)


def test_numbers_of_a_rule_are_float32():
    hyper = dict(update_rule(penstock.Adam(beta_1=0.9)).hyper)
    assert hyper["beta1"] == float(np.float32(0.9))
    assert hyper["use_sum_inside_sqrt"] is True


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        ("Adagrad", {"initial_accumulator_value": -0.1}, "initial_accumulator_value must be > 0, got -0.1"),
        ("FTRL", {"initial_accumulator_value": 0, "allow_zero_accumulator": True}, "initial_accumulator_value"),
        ("AdagradMomentum", {"epsilon": 0.0}, "epsilon must be > 0"),
        ("AdagradMomentum", {"exponent": 0}, "exponent must be > 0"),
        ("Adam", {"beta_1": 1.0}, "beta_1 must be at least 0 and below 1, got 1.0"),
        ("Adam", {"beta_2": -0.1}, "beta_2 must be"),
        ("Adam", {"epsilon": 0}, "epsilon must be > 0"),
        ("Lion", {"beta2": 1.0}, "beta2 must be"),
        ("RMSProp", {"rho": 1.0}, "rho must be"),
        ("RMSProp", {"initial_ms_value": -1.0}, "initial_ms_value must be at least 0"),
        ("CenteredRMSProp", {"epsilon": 0.0}, "epsilon must be > 0"),
        ("Adadelta", {"rho": -1.0}, "rho must be"),
        ("ProximalAdagrad", {"l1": -1.0}, "l1 must be at least 0"),
        ("BoundedAdagrad", {"max_accumulator": -1.0}, "max_accumulator must be at least 0"),
        ("RowWiseAdagrad", {"initial_accumulator_value": 0.0}, "initial_accumulator_value must be > 0"),
        ("RowWiseAdagrad", {"epsilon": -1e-8}, "epsilon must be at least 0, got -1e-08"),
        ("TorchAdagrad", {"epsilon": -1e-10}, "epsilon must be > 0, got -1e-10"),
        ("TorchAdagrad", {"lr_decay": -0.5}, "lr_decay must be at least 0, got -0.5"),
        ("TorchAdagrad", {"initial_accumulator_value": -1.0}, "initial_accumulator_value must be at least 0"),
        ("PartialRowWiseAdam", {"beta2": 1.0}, "beta2 must be at least 0 and below 1, got 1.0"),
        ("PartialRowWiseAdam", {"epsilon": 0.0}, "epsilon must be > 0, got 0.0"),
        ("OnlineYogi", {"beta2": 1.5}, "beta2 must be"),
        ("ProximalYogi", {"epsilon": 0.0}, "epsilon must be > 0"),
        ("FrequencyEstimator", {"tau": 0.0}, "tau must be above 0 and below 1, got 0.0"),
        ("FrequencyEstimator", {"max_delta": 0.0}, "max_delta must be > 0"),
        ("UserDefinedProgram", {"program": 3}, r"program must be a function \(gradient, weights, \*slots\), got 3"),
        ("UserDefinedProgram", {"program": halve, "initial_slot_values": [0.0] * 7}, "at most 6 slots, got 7"),
    ],
)
def test_arguments_without_a_meaning_are_refused(name, arguments, match):
    with pytest.raises(penstock.ConfigError, match=match):
        getattr(penstock, name)(**arguments)


@pytest.mark.parametrize("name", ["Adagrad", "FTRL"])
def test_nan_passes_every_comparison_as_in_tensorflow(name):
    assert math.isnan(getattr(penstock, name)(initial_accumulator_value=math.nan).initial_accumulator_value)


def test_tensorflows_arguments_can_be_given_by_position():
    assert penstock.SGD(0.1, True, -1.0, 2.0) == penstock.SGD(0.1, clip_weight_min=-1.0, clip_weight_max=2.0)
    assert penstock.Adam(0.1, 0.8, 0.9, 1e-3, True, False) == penstock.Adam(
        0.1, beta_1=0.8, beta_2=0.9, epsilon=1e-3, sum_inside_sqrt=False
    )
    by_position = penstock.FTRL(0.1, -0.25, 0.5, 0.75, 0.125, 0.2, True, None, None, None, None, None, None, True)
    assert by_position.multiply_linear_by_learning_rate
    assert (by_position.beta, by_position.initial_accumulator_value) == (0.125, 0.2)


def test_an_optimizer_equals_itself_after_its_arguments():
    for name in OPTIMIZERS:
        assert made(name) == made(name)
        assert hash(made(name)) == hash(made(name))
        assert made(name) != made(name, use_gradient_accumulation=False)


def test_a_proto_may_hold_what_a_constructor_refuses():
    config = config_of(penstock.Adam()).to_proto()
    config.table_descriptor[0].optimization_parameters.adam.Clear()
    config.table_descriptor[0].optimization_parameters.adam.SetInParent()
    (table,) = EmbeddingConfig.from_proto(config).tables
    assert dict(table.rule.hyper) == {"beta1": 0.0, "beta2": 0.0, "epsilon": 0.0, "use_sum_inside_sqrt": False}


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_packing_status_is_kept_whatever_it_is(status):
    optimizer = penstock.SGD(low_dimensional_packing_status=status)
    assert optimization_parameters(optimizer, None).low_dimensional_packing_status == status
    assert config_of(optimizer).optimizer("a").low_dimensional_packing_status == status


def test_row_wise_adagrad_is_for_an_engine_config_only(tmp_path):
    config = config_of(penstock.RowWiseAdagrad(0.25, 0.5))
    with pytest.raises(penstock.ConfigError, match="row_wise_adagrad is an optimizer of our own"):
        config.to_proto()
    config.save(tmp_path / "c.pbtxt")
    assert "row_wise_adagrad {" in (tmp_path / "c.pbtxt").read_text()
    (table,) = EmbeddingConfig.load(tmp_path / "c.pbtxt").tables
    assert (table.optimizer, table.slots) == (penstock.RowWiseAdagrad(0.25, 0.5), (("accumulators", 0.5),))
    assert table.rule.algorithm == "row_wise_adagrad"


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (penstock.RowWiseAdagrad(0.25), "row_wise_adagrad {\n    }"),
        (penstock.RowWiseAdagrad(0.25, 0.0, epsilon=0.5), "row_wise_adagrad {\n      epsilon: 0.5\n    }"),
        (penstock.TorchAdagrad(0.25), "torch_adagrad {\n    }"),
        (penstock.TorchAdagrad(0.25, 0.5, 0.75), "torch_adagrad {\n      epsilon: 0.75\n      lr_decay: 0.5\n    }"),
        (penstock.PartialRowWiseAdam(0.25, beta2=0.5), "partial_row_wise_adam {\n      beta2: 0.5\n    }"),
    ],
)
def test_a_file_has_the_numbers_of_our_own_optimizers_that_are_not_the_defaults(tmp_path, optimizer, text):
    config_of(optimizer).save(tmp_path / "c.pbtxt")
    written = " ".join((tmp_path / "c.pbtxt").read_text().split())
    assert " ".join(text.split()) in written
    (table,) = EmbeddingConfig.load(tmp_path / "c.pbtxt").tables
    assert table.rule == config_of(optimizer).table("a").rule
    assert table.slots == config_of(optimizer).table("a").slots


def test_an_epsilon_that_float32_makes_0_is_refused():
    with pytest.raises(penstock.ConfigError, match=r"table 'a': torch_adagrad.epsilon is 0; it must be above 0"):
        config_of(penstock.TorchAdagrad(epsilon=1e-50))


def test_a_users_program_is_of_this_process_only(tmp_path):
    config = config_of(UserDefinedProgram(halve, initial_slot_values=[0.5, 2.0]))
    (table,) = config.tables
    assert table.rule.program is halve
    assert table.slots == (("Slot_0", 0.5), ("Slot_1", 2.0))
    for refused in (config.to_proto, lambda: config.save(tmp_path / "c.pb")):
        with pytest.raises(penstock.ConfigError, match="table 'a': its program is a Python function"):
            refused()
    with pytest.raises(penstock.ConfigError, match="table 'a': the program of a file is XLA's own form"):
        EmbeddingConfig.from_proto(config.to_engine_proto()).table("a")


def test_the_frequency_estimator_counts_steps_from_the_largest_distance():
    config = config_of(penstock.FrequencyEstimator(max_delta=50.0))
    assert config.table("a").initializer == Constant(50.0)
    assert [schedule(7) for schedule in config.schedules.values()] == [7.0]
    assert config_of(penstock.FrequencyEstimator(), initializer=Constant(3.0)).table("a").initializer == Constant(3.0)


def test_a_step_counter_gets_a_separate_tag():
    config = config_of(penstock.FrequencyAwareAdagrad(learning_rate=float))
    assert config.num_tags == 2
    message = config.to_proto()
    assert message.table_descriptor[0].optimization_parameters.frequency_aware_adagrad.step_counter.tag == 1
    again: Any = EmbeddingConfig.from_proto(message).optimizer("a")
    assert (again.learning_rate.tag, again.step_counter.tag) == (0, 1)


def test_simulated_quantization_is_part_of_the_spec():
    config = config_of(penstock.SGD(), quantization_config=penstock.QuantizationConfig(16, -1, 2.5))
    assert dataclasses.astuple(config.table("a").quantization) == (16, -1.0, 2.5)
    assert config_of(penstock.SGD()).table("a").quantization is None


def test_any_slot_can_start_elsewhere_in_an_engine_config():
    message = config_of(penstock.Momentum()).to_engine_proto()
    message.table.add(name="a").slot.add(name="momenta", initial_value=0.5)
    assert EmbeddingConfig.from_proto(message).table("a").slots == (("momenta", 0.5),)


def test_a_subclass_of_an_initializer_is_written_as_its_base():
    @dataclasses.dataclass(frozen=True)
    class Named(penstock.Uniform):
        note: str = "x"

    table = penstock.TableConfig(4, 2, initializer=Named(-1.0, 1.0), name="t", optimizer=penstock.SGD())
    spec = penstock.EmbeddingConfig.from_features([penstock.FeatureConfig(table)], batch_size=1).tables[0]
    assert spec.initializer == penstock.Uniform(-1.0, 1.0)


def test_a_row_id_initializer_fills_rows_with_their_id(tmp_path):
    start = RowIdInitializer(5)
    assert start((3, 2), "float32").tolist() == [[5, 5], [6, 6], [7, 7]]
    assert start((3, 2), np.float32).dtype == np.float32
    config_of(penstock.SGD(), initializer=start).save(tmp_path / "c.pbtxt")
    assert EmbeddingConfig.load(tmp_path / "c.pbtxt").table("a").initializer == start
