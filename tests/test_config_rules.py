"""The structural rules that loading enforces, and the findings of lint. One configuration breaks one rule."""

import pytest
from google.protobuf import text_format

from penstock.config.embedding import EmbeddingConfig
from penstock.config.engine_config_pb2 import EngineConfig
from penstock.config.lint import RULES
from penstock.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.errors import ConfigError

TABLE = """table_descriptor { name: "%s" vocabulary_size: 10 dimension: 4
  optimization_parameters { %s { } learning_rate { %s } } }"""
PLAIN = TABLE % ("a", "adagrad", "constant: 0.5")
FEATURE = 'feature_descriptor { name: "f" input_shape: 8 }'


def plain(text):
    return EmbeddingConfig.from_proto(text_format.Parse(text, TPUEmbeddingConfiguration()))


def engine(settings, tables=PLAIN):
    return EmbeddingConfig.from_proto(
        text_format.Parse(f"tpu_embedding_configuration {{ {tables} }} {settings}", EngineConfig())
    )


def dynamic(*tags):
    return "".join(TABLE % (f"t{i}", "adagrad", f"dynamic {{ tag: {tag} }}") for i, tag in enumerate(tags))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("mode: TRAINING", "no tables"),
        (PLAIN.replace('"a"', '""'), r"table_descriptor\[0\]: name is empty"),
        (PLAIN + PLAIN, r"table_descriptor\[1\]: name 'a' is also that of table_descriptor\[0\]"),
        (PLAIN.replace("vocabulary_size: 10", ""), "table 'a': vocabulary_size is 0"),
        (PLAIN.replace("dimension: 4", "dimension: -4"), "table 'a': dimension is -4"),
        (PLAIN.replace("adagrad { }", ""), "table 'a': no optimizer"),
        (PLAIN.replace("constant: 0.5", ""), "table 'a': no learning rate"),
        (PLAIN.replace("0.5", "nan"), "table 'a': learning rate is nan"),
        (PLAIN.replace("adagrad", "weight_decay_factor: inf adagrad"), "weight_decay_factor is inf"),
        (PLAIN.replace("adagrad", "clipping_limits { lower { value: nan } } adagrad"), "clipping_limits has a bound"),
        (PLAIN + "mode: 9", "mode is 9"),
        (PLAIN + "sharding_strategy: 9", "sharding_strategy is 9"),
        (dynamic(0, 2), "table 't1': dynamic tag 2, .* no table uses tag 1"),
        (dynamic(1), "table 't0': dynamic tag 1, .* no table uses tag 0"),
        (dynamic(0, -1), "table 't1': dynamic tag -1, .* cannot be negative"),
        (PLAIN + "batch_size_per_tensor_core: -1", "batch_size_per_tensor_core is -1"),
        (PLAIN + FEATURE + "batch_size_per_tensor_core: 8", "batch_size_per_tensor_core is 8, but features are listed"),
        (PLAIN.replace("dimension", "num_features: 1 dimension") + FEATURE, "table 'a': num_features is 1"),
        (PLAIN + FEATURE.replace("input", "table_id: 1 input"), "feature 'f': table_id is 1; use one of 0 to 0"),
        (PLAIN + FEATURE.replace("input_shape: 8", ""), r"feature 'f': input_shape is \[\]"),
        (PLAIN + FEATURE.replace("8", "0"), r"feature 'f': input_shape is \[0\]"),
    ],
)
def test_a_broken_configuration_is_refused(text, match):
    with pytest.raises(ConfigError, match=match):
        plain(text)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ('table { name: "b" }', "no table has that name; there is 'a'"),
        ('table { name: "a" } table { name: "a" }', "settings of table 'a': given twice"),
        ('table { name: "a" slot { name: "accumulator" } }', "adagrad has no slot 'accumulator'; did you mean"),
        ('table { name: "a" slot { name: "accumulators" initial_value: 0 } }', "initial_accumulator_value must be > 0"),
        ('table { name: "a" slot { name: "accumulators" initial_value: nan } }', "it must be finite"),
        ('table { name: "a" slot { name: "x" } slot { name: "x" } }', "slot 'x' is given twice"),
        ('table { name: "a" uniform { min: 1 max: -1 } }', r"min 1.0 > max -1.0"),
        ('table { name: "a" truncated_normal { stddev: -1 } }', "stddev is -1.0"),
        ('table { name: "a" constant { value: inf } }', "not finite"),
        ('feature { name: "g" }', "no feature has that name; there is 'f'"),
        ('feature { name: "f" } feature { name: "f" }', "settings of feature 'f': given twice"),
        ('feature { name: "f" combiner: "means" }', "combiner is 'means'; did you mean 'mean'"),
        ('feature { name: "f" max_sequence_length: -1 }', "max_sequence_length is -1"),
        ("gate { num_required: 0 }", "gate: num_required is 0"),
        ("gate { reduction: 7 }", "gate: reduction is 7"),
    ],
)
def test_broken_engine_settings_are_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        engine(settings, PLAIN + FEATURE)


def test_a_step_counter_shares_the_tags():
    counter = TABLE.replace("%s { }", "frequency_aware_adagrad { step_counter { tag: 1 } }", 1) % ("b", "constant: 1")
    assert plain(TABLE % ("a", "adagrad", "dynamic { }") + counter.replace("%s", "")).num_tags == 2
    with pytest.raises(ConfigError, match="table 'b': dynamic tag 1"):
        plain(counter)


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (PLAIN + "mode: TRAINING", []),
        (PLAIN, ["PS101"]),
        (PLAIN + "mode: INFERENCE", ["PS102"]),
        (PLAIN + TABLE % ("b", "adagrad", "constant: 1") + FEATURE + "mode: TRAINING", ["PS103"]),
        (PLAIN + "mode: TRAINING batch_size_per_tensor_core: 8", ["PS104"]),
        (TABLE % ("a", "mdl_adagrad_light", "constant: 1") + "mode: TRAINING", ["PS201"]),
    ],
)
def test_findings_about_the_whole(text, codes):
    assert [finding.code for finding in plain(text).lint()] == codes


@pytest.mark.parametrize(
    ("parameters", "codes"),
    [
        ("clipping_limits { lower { value: 1 } upper { value: 0 } }", ["PS202"]),
        ("gradient_clipping_limits { lower { value: 1 } upper { value: -1 } }", ["PS203"]),
        ("gradient_clipping_limits { upper { value: 1 } } gradient_accumulation_status: DISABLED", ["PS206"]),
        ("weight_decay_factor: 1", ["PS204"]),
        ("weight_decay_factor: 2 multiply_weight_decay_factor_by_learning_rate: true", []),
        ("multiply_weight_decay_factor_by_learning_rate: true", ["PS205"]),
    ],
)
def test_findings_about_optimization_parameters(parameters, codes):
    found = plain(PLAIN.replace("adagrad", f"{parameters} adagrad") + "mode: TRAINING").lint()
    assert [finding.code for finding in found] == codes
    assert all(finding.where.startswith("table_descriptor[0].optimization_parameters.") for finding in found)


@pytest.mark.parametrize("rate", ["0", "-0.5"])
def test_a_learning_rate_that_does_not_descend_is_found(rate):
    (finding,) = plain(TABLE % ("a", "adagrad", f"constant: {rate}") + "mode: TRAINING").lint()
    assert (finding.code, finding.severity) == ("PS207", "warning")


def test_integer_storage_is_found():
    found = engine('table { name: "a" storage_dtype: INT32 }', PLAIN + "mode: TRAINING").lint()
    assert [finding.code for finding in found] == ["PS105"]


def test_every_finding_has_its_rules_severity():
    for finding in plain(PLAIN + TABLE % ("b", "adam", "constant: 0") + FEATURE).lint():
        assert finding.severity == RULES[finding.code][0]
