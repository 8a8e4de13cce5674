"""EmbeddingConfig.from_features: nesting, names, tags and shapes as TensorFlow has them, and nothing lost in a file."""

from collections import namedtuple

import numpy as np
import pytest
from text_configs import WORKED_BYTES, serialized

import penstock
from penstock import Adagrad, EmbeddingConfig, FeatureConfig, QuantizationConfig, TableConfig
from penstock.model.config.features import flatten, pack, shape_of


def two_tables(**kwargs):
    user = TableConfig(1000, 16, name="user", combiner="sum", **kwargs)
    return user, TableConfig(50, 8, combiner="sqrtn")


def shapes(features, **arguments):
    config = EmbeddingConfig.from_features(features, optimizer=Adagrad(), **arguments)
    return [feature.input_shape for feature in config.features]


def test_the_worked_example_is_tensorflows_to_the_byte():
    def warmup():
        return 0.5

    user = TableConfig(
        1000,
        16,
        name="user",
        optimizer=penstock.SGD(
            warmup,
            clipvalue=(None, 1.5),
            weight_decay_factor=0.01,
            multiply_weight_decay_factor_by_learning_rate=True,
        ),
    )
    item = TableConfig(50, 8, name="item")
    config = EmbeddingConfig.from_features(
        [
            FeatureConfig(user, name="u"),
            FeatureConfig(item, name="i"),
            FeatureConfig(item, max_sequence_length=4, name="seq"),
        ],
        batch_size=8,
        optimizer=Adagrad(0.25),
        num_hosts=2,
        num_replicas=4,
        pipeline_execution_with_tensor_core=True,
    )
    assert serialized(config.to_proto()) == WORKED_BYTES
    assert dict(config.schedules) == {0: warmup}


def test_dictionaries_are_visited_by_sorted_key_and_tables_come_by_first_use():
    a, b = TableConfig(10, 4), TableConfig(20, 4)
    config = EmbeddingConfig.from_features(
        {"z": FeatureConfig(a, name="z"), "a10": [FeatureConfig(b, name="p"), (FeatureConfig(a, name="q"),)]},
        batch_size=4,
        optimizer=Adagrad(),
    )
    assert [feature.name for feature in config.features] == ["p", "q", "z"]
    assert config.sizes == {"table_0": (20, 4), "table_1": (10, 4)}
    assert config.feature_structure == {"z": 2, "a10": [0, (1,)]}


def test_each_configuration_of_the_same_tables_has_its_own_optimizer_and_names():
    shared, other = TableConfig(10, 4), TableConfig(20, 8, name="other", optimizer=Adagrad(0.5))
    features = {"user": [FeatureConfig(shared), {"deep": FeatureConfig(shared)}], "item": FeatureConfig(other)}
    first = EmbeddingConfig.from_features(features, batch_size=4, optimizer=Adagrad(0.25))
    second = EmbeddingConfig.from_features([features["user"], FeatureConfig(other)], 4, penstock.SGD(0.125))
    third = EmbeddingConfig.from_tables([shared, TableConfig(5, 2)], penstock.SGD(0.5))
    assert (shared.name, shared.optimizer, other.optimizer) == (None, None, Adagrad(0.5))
    assert [first.optimizer(name) for name in first.table_names] == [Adagrad(0.5), Adagrad(0.25)]
    assert [second.optimizer(name) for name in second.table_names] == [penstock.SGD(0.125), Adagrad(0.5)]
    assert (first.table_names, second.table_names) == (("other", "table_1"), ("table_0", "other"))
    assert third.optimizer("table_0") == penstock.SGD(0.5)
    assert TableConfig(10, 4) != shared  # equality stays identity


def test_a_second_engine_over_the_same_features_trains_by_its_own_optimizer():
    feature = {"f": FeatureConfig(TableConfig(10, 4, name="t"))}
    rows = {}
    for optimizer in (Adagrad(0.5), penstock.SGD(0.5)):
        engine = penstock.Engine(EmbeddingConfig.from_features(feature, 4, optimizer))
        before = engine.lookup("t", [3])
        engine.apply({"t": (np.array([3]), np.full((1, 4), 0.25, np.float32))})
        rows[type(optimizer)] = engine.lookup("t", [3]) - before
    np.testing.assert_allclose(rows[penstock.SGD], -0.125, rtol=1e-6)
    np.testing.assert_allclose(rows[Adagrad], -0.125 / np.sqrt(0.1 + 0.0625), rtol=1e-5)


def test_a_refused_configuration_leaves_its_tables_as_they_were():
    table = TableConfig(10, 4)
    with pytest.raises(penstock.ConfigError):
        EmbeddingConfig.from_features(FeatureConfig(table), optimizer=Adagrad())
    assert (table.name, table.optimizer) == (None, None)


def test_any_nesting_is_flattened_and_packed_again():
    Pair = namedtuple("Pair", "left right")
    nested = {"b": Pair(1, [2, 3]), "a": (4,), "c": 5}
    assert flatten(nested) == [4, 1, 2, 3, 5]
    assert pack(nested, flatten(nested)) == nested
    assert isinstance(pack(nested, flatten(nested))["b"], Pair)


def test_shapes_come_from_the_batch_size():
    table = TableConfig(10, 4)
    features = [FeatureConfig(table), FeatureConfig(table, 3), FeatureConfig(table, 3, output_shape=[8, 2])]
    assert shapes(features, batch_size=8) == [(8,), (8, 3), (8, 2)]
    assert shapes(features, per_replica_batch_size=8) == [(8,), (8, 3), (8, 2)]
    assert shapes(features, per_replica_input_shapes=8) == [(8,), (8, 3), (8, 2)]


def test_shapes_come_from_the_inputs_without_their_last_axis():
    table = TableConfig(10, 4)
    features = {"a": FeatureConfig(table), "b": [FeatureConfig(table, 3), FeatureConfig(table, 3)]}
    value = {"a": [4, 2, 9], "b": [[4, 9], (4, 1)]}
    assert shapes(features, per_replica_input_shapes=value, batch_size=77) == [(4, 2), (4, 3), (4,)]


@pytest.mark.parametrize(
    ("feature", "arguments", "match"),
    [
        ({}, {}, r"feature 'f': its shape is not fully known \(unknown\); give batch_size"),
        ({"output_shape": [None, 3]}, {"batch_size": 4}, r"not fully known \(\[None, 3\]\)"),
        ({"output_shape": [5]}, {"batch_size": 4}, r"output_shape is \[5\], but its input gives \[4\]"),
        ({}, {"per_replica_input_shapes": [[]]}, "an input shape needs at least one axis"),
        ({}, {"per_replica_input_shapes": [[4], [4]]}, "expected 1 entries"),
        ({}, {"batch_size": 4, "per_replica_batch_size": 5}, "batch_size is 4, but per_replica_batch_size 5"),
        ({}, {"batch_size": 4, "num_replicas": 2, "num_replicas_in_sync": 4}, "num_replicas is 2"),
        ({}, {"batch_size": 2**40}, "feature 'f': "),
    ],
)
def test_shapes_that_are_not_known_or_conflict_are_refused(feature, arguments, match):
    with pytest.raises(penstock.ConfigError, match=match):
        shapes([FeatureConfig(TableConfig(10, 4), name="f", **feature)], **arguments)


def test_a_batch_says_nothing_about_a_shape_of_higher_rank():
    assert shapes([FeatureConfig(TableConfig(10, 4), output_shape=[2, 3])], batch_size=9) == [(2, 3)]


@pytest.mark.parametrize(
    ("value", "shape"), [(None, None), (5, (5,)), ([], ()), ([None, 3], (None, 3)), (iter([1, 2]), (1, 2))]
)
def test_shapes_are_read_as_tensorflow_does(value, shape):
    assert shape_of(value) == shape


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"table": None}, penstock.ConfigError, "table must be a TableConfig"),
        ({"max_sequence_length": -1}, penstock.ConfigError, "max_sequence_length must be an int of at least 0"),
        ({"max_sequence_length": 2.0}, penstock.ConfigError, "max_sequence_length must be an int"),
        ({"validate_weights_and_indices": 1}, penstock.ConfigError, "must be a bool, got 1"),
        ({"output_shape": [-1]}, penstock.ConfigError, "a shape has no negative dims"),
        ({"output_shape": "4"}, TypeError, "a shape must be an int or a sequence"),
        ({"output_shape": [2.5]}, TypeError, "a shape must be an int or a sequence"),
    ],
)
def test_wrong_feature_arguments_are_refused(arguments, kind, match):
    with pytest.raises(kind, match=match):
        FeatureConfig(**{"table": TableConfig(10, 4), **arguments})


def test_features_with_the_same_content_are_two_features():
    table = TableConfig(10, 4)
    assert FeatureConfig(table) != FeatureConfig(table)


def test_small_tables_get_a_row_for_every_host():
    config = EmbeddingConfig.from_features(
        FeatureConfig(TableConfig(3, 4, name="a")), batch_size=4, optimizer=Adagrad(), num_hosts=8
    )
    assert config.sizes == {"a": (8, 4)}


@pytest.mark.parametrize(("cores", "total", "enabled"), [(None, 4, False), (1, 4, True), (2, 8, True)])
def test_cores_per_replica_multiply_and_turn_spmd_on(cores, total, enabled):
    config = EmbeddingConfig.from_features(
        FeatureConfig(TableConfig(3, 4)),
        batch_size=4,
        optimizer=Adagrad(),
        num_replicas_in_sync=4,
        num_cores_per_replica=cores,
    )
    message = config.to_proto()
    assert message.num_tensor_cores == total
    assert message.spmd_sharding.enabled == enabled


def test_settings_that_tensorflows_message_lacks_survive_a_file(tmp_path):
    user, item = two_tables(initializer=penstock.Uniform(-1.0, 1.0), quantization_config=QuantizationConfig(4, 0, 1))
    features = [
        FeatureConfig(user, name="u"),
        FeatureConfig(item, 5),
        FeatureConfig(item, name="twice"),
        FeatureConfig(user, name="twice"),
    ]
    config = EmbeddingConfig.from_features(features, 4, Adagrad(0.1, 0.5), num_required=3, reduction="sum")
    config.save(tmp_path / "c.pbtxt")
    again = EmbeddingConfig.load(tmp_path / "c.pbtxt")
    assert again.features == config.features
    assert [f.combiner for f in again.features] == ["sum", "sqrtn", "sqrtn", "sum"]
    assert [f.max_sequence_length for f in again.features] == [0, 5, 0, 0]
    assert again.tables == config.tables
    assert (again.gate_num_required, again.gate_reduction) == (3, "sum")
    assert again.feature_structure == [0, 1, 2, 3]


def test_unhashable_callables_are_a_type_error_as_in_tensorflow():
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self):
            return 0.1

    with pytest.raises(TypeError, match="unhashable"):
        EmbeddingConfig.from_features(FeatureConfig(TableConfig(3, 4)), 4, penstock.SGD(Unhashable()))


def test_an_infinite_learning_rate_is_refused_only_when_run():
    config = EmbeddingConfig.from_features(FeatureConfig(TableConfig(3, 4, name="a")), 4, penstock.SGD(1e40))
    assert config.to_proto().table_descriptor[0].optimization_parameters.learning_rate.constant == float("inf")
    assert [finding.code for finding in config.lint()] == ["PS009"]
    with pytest.raises(penstock.ConfigError, match="table 'a': learning rate is inf"):
        _ = config.tables


def test_no_features_make_an_empty_message():
    config = EmbeddingConfig.from_features([], batch_size=4, optimizer=Adagrad())
    assert (config.table_names, config.features) == ((), ())
    with pytest.raises(penstock.ConfigError, match="no tables"):
        _ = config.tables


@pytest.mark.parametrize(
    ("features", "optimizer", "match"),
    [
        ([3], Adagrad(), "feature 0 must be a FeatureConfig, got 3"),
        (FeatureConfig(TableConfig(3, 4)), None, "table 'table_0': no optimizer"),
        (FeatureConfig(TableConfig(3, 4)), "sgd", "optimizer must be an optimizer instance, got 'sgd'"),
        (
            [FeatureConfig(TableConfig(3, 4)), FeatureConfig(TableConfig(3, 4, name="table_0"))],
            Adagrad(),
            "two tables are named 'table_0'",
        ),
    ],
)
def test_features_that_make_no_configuration_are_refused(features, optimizer, match):
    with pytest.raises(penstock.ConfigError, match=match):
        EmbeddingConfig.from_features(features, 4, optimizer)


def test_integer_tables_are_kept_but_not_run():
    config = EmbeddingConfig.from_features(FeatureConfig(TableConfig(3, 4, name="a", dtype="int32")), 4, Adagrad())
    assert [finding.code for finding in config.lint()] == ["PS105"]
    with pytest.raises(penstock.ConfigError, match="table 'a': storage_dtype INT32 is not supported"):
        _ = config.tables
