"""EmbeddingConfig: what it says of its tables, tags, features and gate, and which configurations it refuses."""

import copy
from typing import Any

import pytest
from google.protobuf import text_format
from text_configs import PLAIN, TABLE, engine, plain

from penstock.base.errors import ConfigError
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.engine_config_pb2 import EngineConfig
from penstock.model.config.specs import FeatureSpec
from penstock.model.config.tables import TableConfig, TruncatedNormal, Uniform
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.model.updates import SGD, Adagrad, DynamicLearningRate, UpdateRule


def test_a_table_is_read_whole():
    (table,) = plain(PLAIN).tables
    assert (table.name, table.vocabulary_size, table.dim) == ("a", 10, 4)
    assert table.optimizer == Adagrad(0.5)
    assert (table.learning_rate, table.tag) == (0.5, None)
    assert table.initializer == TruncatedNormal(0.0, 0.5)
    assert table.slots == (("accumulators", pytest.approx(0.1, abs=1e-8)),)
    assert table.rule == UpdateRule("adagrad", 1)
    assert table.storage_dtype == "float32"


@pytest.mark.parametrize(("status", "on"), [("UNSPECIFIED", True), ("ENABLED", True), ("DISABLED", False)])
def test_accumulation_is_on_unless_disabled(status, on):
    text = PLAIN.replace("learning_rate", f"gradient_accumulation_status: {status} learning_rate")
    assert plain(text).table("a").accumulate is on


def test_a_dynamic_rate_with_tag_zero_is_dynamic():
    table = plain(TABLE % ("a", "adagrad", "dynamic { }")).table("a")
    assert (table.learning_rate, table.tag) == (None, 0)
    assert table.optimizer.learning_rate == DynamicLearningRate(0)


def test_the_other_settings_are_read():
    config = plain(PLAIN + "mode: INFERENCE sharding_strategy: MOD")
    assert (config.mode, config.sharding_strategy) == ("INFERENCE", "MOD")
    assert plain(PLAIN).sharding_strategy == "DIV"
    assert (config.gate_num_required, config.gate_reduction) == (None, None)


def test_engine_settings_are_read():
    config = engine(
        'table { name: "a" uniform { min: -1 max: 1 } slot { name: "accumulators" initial_value: 0.5 } }'
        'feature { name: "f" combiner: "sqrtn" max_sequence_length: 3 }'
        "gate { num_required: 4 reduction: SUM }",
        PLAIN + 'feature_descriptor { name: "f" input_shape: [8, 3] }',
    )
    assert config.table("a").initializer == Uniform(-1.0, 1.0)
    assert config.table("a").slots == (("accumulators", 0.5),)
    assert config.features == (FeatureSpec("f", "a", (8, 3), "sqrtn", 3),)
    assert (config.gate_num_required, config.gate_reduction) == (4, "sum")


def test_counted_features_give_one_per_table():
    counted = PLAIN.replace("dimension", "num_features: 3 dimension")
    assert plain(counted + "batch_size_per_tensor_core: 8").features == (FeatureSpec("a", "a", (24,)),)


def test_tables_from_classes_keep_their_order_and_get_names():
    config = EmbeddingConfig.from_tables([TableConfig(10, 4), TableConfig(20, 8, name="b")], SGD())
    assert config.sizes == {"table_0": (10, 4), "b": (20, 8)}
    assert config.mode == "TRAINING"


def test_equal_callables_share_a_tag_and_lambdas_do_not():
    class Schedule:
        def rate(self):
            return 0.5

    schedule, other = Schedule(), lambda: 0.5
    rates: list[Any] = [schedule.rate, other, schedule.rate, 0.5]
    config = EmbeddingConfig.from_tables([TableConfig(10, 4, optimizer=SGD(rate)) for rate in rates])
    assert [table.tag for table in config.tables] == [0, 1, 0, None]
    assert config.num_tags == 2
    assert dict(config.schedules) == {0: schedule.rate, 1: other}


def test_a_rate_from_outside_needs_no_callable():
    config = EmbeddingConfig.from_tables([TableConfig(10, 4)], SGD(DynamicLearningRate(0)))
    assert config.table("table_0").tag == 0
    assert not config.schedules


def test_a_rate_from_outside_must_have_the_tag_it_gets():
    with pytest.raises(ConfigError, match=r"has tag 1 but is number 0 by first use"):
        EmbeddingConfig.from_tables([TableConfig(10, 4)], SGD(DynamicLearningRate(1)))


def test_the_message_given_and_the_message_returned_are_copies():
    message = text_format.Parse(PLAIN, TPUEmbeddingConfiguration())
    config = EmbeddingConfig.from_proto(message)
    message.table_descriptor[0].name = "b"
    config.to_proto().table_descriptor[0].name = "c"
    assert config.table_names == ("a",)


def test_a_configuration_can_be_copied():
    config = EmbeddingConfig.from_tables([TableConfig(10, 4)], SGD(float))
    again = copy.deepcopy(config)
    assert (again.tables, dict(again.schedules)) == (config.tables, dict(config.schedules))


@pytest.mark.parametrize("algorithm", ["mdl_adagrad_light", "frequency_aware_adagrad"])
def test_an_optimizer_without_a_public_formula_is_kept_but_not_run(algorithm):
    config = plain(PLAIN + TABLE % ("b", algorithm, "constant: 0.5"))
    assert config.sizes == {"a": (10, 4), "b": (10, 4)}
    assert config.to_proto().table_descriptor[1].optimization_parameters.HasField(algorithm)
    assert config.table("a").dim == 4
    assert config.optimizer("b").parameters_field == algorithm
    with pytest.raises(ConfigError, match=f"table 'b': optimizer '{algorithm}' cannot be run: TensorFlow publishes"):
        _ = config.tables


def test_the_storage_dtype_of_a_table_is_that_of_its_settings():
    assert engine('table { name: "a" storage_dtype: BFLOAT16 }').table("a").storage_dtype == "bfloat16"
    assert engine('table { name: "a" storage_dtype: FLOAT32 }').table("a").storage_dtype == "float32"


def test_an_unknown_table_names_its_neighbour():
    with pytest.raises(ConfigError, match="no table is named 'A1'; there is 'a'"):
        plain(PLAIN).table("A1")


@pytest.mark.parametrize(
    ("tables", "match"),
    [
        ([TableConfig(10, 4)], "table 'table_0': no optimizer"),
        ([TableConfig(10, 4, optimizer="sgd")], "optimizer must be an optimizer instance, got 'sgd'"),
        ([TableConfig(10, 4, optimizer=SGD(1e300))], "learning rate is inf"),
        ([TableConfig(10, 2**31, optimizer=SGD())], "table 'table_0': "),
        ([TableConfig(10, 4, optimizer=SGD(), dtype="int32")], "must be float32 or bfloat16, got int32"),
        ([TableConfig(10, 4, name=n, optimizer=SGD()) for n in "aa"], "give every table its own name"),
        ([TableConfig(10, 4, optimizer=SGD())] * 2, "list each table once"),
        ([], "no tables"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_classes_that_make_no_configuration_are_refused(tables, match):
    with pytest.raises(ConfigError, match=match):
        EmbeddingConfig.from_tables(tables)


def test_a_learning_rate_of_the_wrong_type_is_a_type_error():
    with pytest.raises(TypeError, match=r"table 'table_0': .*fast"):
        EmbeddingConfig.from_tables([TableConfig(10, 4)], SGD("fast"))  # type: ignore[arg-type]


def test_from_proto_refuses_other_messages():
    with pytest.raises(ConfigError, match=r"got penstock\.TableSettings"):
        EmbeddingConfig.from_proto(EngineConfig().table.add())
