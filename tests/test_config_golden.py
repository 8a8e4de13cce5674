"""Recorded from TensorFlow: its configuration messages, and when its classes are equal or refuse an argument.

The recordings lie beside the repository, in the project's own checkouts only; elsewhere these tests are skipped,
and the decisive cases stand in the other test_config files.
"""

import base64
import json
from pathlib import Path

import pytest
from google.protobuf import text_format

from penstock.config.embedding import EmbeddingConfig
from penstock.config.files import unknown_fields
from penstock.config.optimizers import SGD, Adagrad
from penstock.config.tables import QuantizationConfig, TableConfig
from penstock.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
CLASSES = {"SGD": SGD, "Adagrad": Adagrad, "TableConfig": TableConfig, "QuantizationConfig": QuantizationConfig}
KINDS = {"ValueError": ValueError, "TypeError": TypeError}


def golden(name):
    path = GOLDEN / name
    if not path.exists():
        pytest.skip(f"{name} is not in this checkout")
    return json.loads(path.read_text())["cases"]


def serialized(message):
    return message.SerializeToString(deterministic=True)


def value(tagged, callables):
    """A Python value of the recorded description: tuples and named callables are tagged."""
    if isinstance(tagged, dict) and "$tuple" in tagged:
        return tuple(tagged["$tuple"])
    if isinstance(tagged, dict) and "$callable" in tagged:
        return callables.setdefault(tagged["$callable"], lambda: tagged.get("value"))
    return tagged


def optimizer(described, callables):
    if described is None:
        return None
    arguments = {name: value(v, callables) for name, v in described["kwargs"].items()}
    return CLASSES[described["$optimizer"]](**arguments)


def optimizers(case):
    return [d for d in (case["optimizer"], *(table.get("optimizer") for table in case["tables"])) if d]


def table(described, callables):
    quantization = described.get("quantization_config")
    return TableConfig(
        described["vocabulary_size"],
        described["dim"],
        optimizer=optimizer(described.get("optimizer"), callables),
        combiner=described.get("combiner", "mean"),
        name=described.get("name"),
        quantization_config=QuantizationConfig(*quantization["$quant"]) if quantization else None,
    )


def order_of_first_use(features):
    if isinstance(features, dict):
        features = [features[name] for name in sorted(features)]
    return dict.fromkeys(feature["table"] for feature in features)


def test_recorded_bytes_are_read_without_unknown_fields_and_written_back_equal():
    for case in golden("config_protos.json"):
        content = base64.b64decode(case["expect"]["proto_base64"])
        message = TPUEmbeddingConfiguration.FromString(content)
        assert unknown_fields(message) is None, case["id"]
        assert serialized(message) == content, case["id"]


def test_recorded_text_is_read_and_printed_equal():
    for case in golden("config_protos.json"):
        text = case["expect"]["text_format"]
        message = text_format.Parse(text, TPUEmbeddingConfiguration())
        assert serialized(message) == base64.b64decode(case["expect"]["proto_base64"]), case["id"]
        assert text_format.MessageToString(message) == text, case["id"]


def test_recorded_configurations_have_their_names_and_tags():
    for case in golden("config_protos.json"):
        message = TPUEmbeddingConfiguration.FromString(base64.b64decode(case["expect"]["proto_base64"]))
        config = EmbeddingConfig.from_proto(message)
        assert list(config.table_names) == case["expect"]["table_names"], case["id"]
        assert config.num_tags == case["expect"]["num_dynamic_tags"], case["id"]
        assert serialized(config.to_proto()) == serialized(message), case["id"]


def test_python_classes_write_the_recorded_tables():
    compared = 0
    for case in golden("config_protos.json"):
        kinds = [described["$optimizer"] for described in optimizers(case)]
        # num_hosts, which pads this one's vocabulary, comes with features.
        if not set(kinds) <= {"SGD", "Adagrad"} or case["id"] == "small_vocab_padded_to_hosts":
            continue
        callables: dict[str, object] = {}
        config = EmbeddingConfig.from_tables(
            [table(case["tables"][index], callables) for index in order_of_first_use(case["features"])],
            optimizer(case["optimizer"], callables),
        )
        expected = TPUEmbeddingConfiguration.FromString(base64.b64decode(case["expect"]["proto_base64"]))
        assert list(config.to_proto().table_descriptor) == list(expected.table_descriptor), case["id"]
        compared += 1
    assert compared >= 20


def test_recorded_equality_and_hashes():
    for case in golden("config_eq_hash.json"):
        if "a" not in case or case["a"][0] not in CLASSES or case["b"][0] not in CLASSES:
            continue
        callables: dict[str, object] = {}
        a, b = (
            CLASSES[name](**{k: value(v, callables) for k, v in arguments.items()})
            for name, arguments in (case["a"], case["b"])
        )
        assert (a == b) == case["equal"], case["id"]
        assert (hash(a) == hash(b)) == case["hash_equal"], case["id"]


def test_recorded_constructor_errors():
    for case in golden("config_invalid.json"):
        if case["stage"] != "constructor" or case["call"] not in CLASSES:
            continue
        arguments = {k: value(v, {}) for k, v in case["kwargs"].items()}
        if "dtype" in arguments:
            arguments["dtype"] = arguments["dtype"]["$str_dtype"]
        if case["raises"] is None:
            CLASSES[case["call"]](**arguments)
            continue
        with pytest.raises(KINDS[case["raises"]]):
            CLASSES[case["call"]](**arguments)
