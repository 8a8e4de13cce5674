"""Recorded from TensorFlow: what its classes accept, how they compare, and the messages it makes of them.

All of it through penstock's public names. The recordings are next to the repository, in the project's checkouts
only; elsewhere these tests are skipped, and the decisive cases stand in the other test_config files.
"""

import base64
import json
from typing import Any

import pytest
from google.protobuf import text_format
from recorded_features import arguments, from_features
from text_configs import serialized

import penstock
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.model.learning_rates import LearningRates

KINDS = {"ValueError": ValueError, "TypeError": TypeError, "AttributeError": AttributeError}


@pytest.fixture
def golden(shared):
    return lambda name: json.loads(shared(f"golden/{name}").read_text())["cases"]


def test_recorded_text_is_read_and_printed_equal(golden):
    for case in golden("config_protos.json"):
        text = case["expect"]["text_format"]
        message = text_format.Parse(text, TPUEmbeddingConfiguration())
        assert serialized(message) == base64.b64decode(case["expect"]["proto_base64"]), case["id"]
        assert text_format.MessageToString(message) == text, case["id"]


def test_recorded_messages_load_with_their_names_and_tags_and_can_be_run(golden):
    for case in golden("config_protos.json"):
        message = TPUEmbeddingConfiguration.FromString(base64.b64decode(case["expect"]["proto_base64"]))
        config = penstock.EmbeddingConfig.from_proto(message)
        assert list(config.table_names) == case["expect"]["table_names"], case["id"]
        assert config.num_tags == case["expect"]["num_dynamic_tags"], case["id"]
        assert serialized(config.to_proto()) == serialized(message), case["id"]
        assert len(config.tables) == len(config.table_names), case["id"]


@pytest.mark.promise("TensorFlow's classes give TensorFlow's messages, byte for byte")
def test_python_classes_make_the_recorded_messages_byte_for_byte(golden):
    for case in golden("config_protos.json"):
        config = from_features(case)
        assert serialized(config.to_proto()) == base64.b64decode(case["expect"]["proto_base64"]), case["id"]
        assert list(config.table_names) == case["expect"]["table_names"], case["id"]
        assert config.num_tags == case["expect"]["num_dynamic_tags"], case["id"]


def test_recorded_configurations_survive_a_file(golden, tmp_path):
    for case in golden("config_protos.json"):
        config = from_features(case)
        for name in ("c.pbtxt", "c.pb"):
            config.save(tmp_path / name)
            again = penstock.EmbeddingConfig.load(tmp_path / name)
            assert serialized(again.to_engine_proto()) == serialized(config.to_engine_proto()), case["id"]
            assert again.features == config.features, case["id"]
            assert [table.slots for table in again.tables] == [table.slots for table in config.tables], case["id"]


def test_recorded_equality_and_hashes(golden):
    for case in golden("config_eq_hash.json"):
        if "a" not in case:
            continue
        known: dict[str, Any] = {}
        a, b = (getattr(penstock, name)(**arguments(value, known)) for name, value in (case["a"], case["b"]))
        assert (a == b) == case["equal"], case["id"]
        assert (hash(a) == hash(b)) == case["hash_equal"], case["id"]


def test_recorded_identities(golden):
    table = penstock.TableConfig(10, 4)
    pairs: dict[str, list[Any]] = {
        "tableconfig_identity": [penstock.TableConfig(10, 4) for _ in range(2)],
        "featureconfig_identity": [penstock.FeatureConfig(table) for _ in range(2)],
        "quantization_identity": [penstock.QuantizationConfig(2, 0.0, 1.0) for _ in range(2)],
    }
    for case in golden("config_eq_hash.json"):
        if "a" not in case:
            a, b = pairs[case["id"]]
            assert (a == b) == case["equal"], case["id"]


def test_recorded_errors(golden):
    for case in golden("config_invalid.json"):

        def attempt(case=case):
            if case["stage"] == "constructor":
                return getattr(penstock, case["call"])(**arguments(case["kwargs"], {}))
            return from_features(case)

        if case["raises"] is None:
            attempt()
            continue
        with pytest.raises(KINDS[case["raises"]]) as caught:
            attempt()
        if case["raises"] == "ValueError":
            assert isinstance(caught.value, penstock.ConfigError), case["id"]


def test_recorded_learning_rates_come_in_the_order_of_their_tags(golden):
    compared = 0
    for case in golden("apply_gradients.json"):
        sent = case.get("expect", case).get("learning_rates")
        if "config" not in case or sent is None:
            continue
        config = from_features(case["config"])
        assert list(LearningRates(config.num_tags, None, config.schedules).at(0, None)) == sent, case["id"]
        compared += 1
    assert compared
