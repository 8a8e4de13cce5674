"""The structural rules that loading enforces: one configuration breaks one rule."""

import cProfile

import pytest
from text_configs import FEATURE, PLAIN, TABLE, engine, plain

from penstock.base.errors import ConfigError
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import TableConfig
from penstock.model.updates import SGD


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


def test_a_long_name_is_one_short_line_and_is_not_searched_for(tmp_path, call):
    path = tmp_path / "long.pbtxt"
    for name, code in (("x" * 1024, 0), ("x" * 1025, 4), ("x" * 5_000_000, 4)):
        path.write_text(PLAIN.replace('"a"', f'"{name}"'))
        actual = call(code, "validate", path)[1]
        assert all(len(error) < 200 for error in actual["errors"])
    (error,) = actual["errors"]
    assert error == f"table_descriptor[0]: name '{'x' * 40}…' has 5000000 bytes; use at most 1024"
    with pytest.raises(ConfigError, match=r"table_descriptor\[0\]: name 'y{40}…' has 1025 bytes; use at most 1024"):
        EmbeddingConfig.from_tables([TableConfig(10, 4, name="y" * 1025)], SGD())
    path.write_text(PLAIN + "z" * 5_000_000 + ": 3")
    assert len(call(4, "validate", path)[1]["error"]) < 600


def many_tables(number):
    tables = "".join(TABLE % (f"t{i}", "adagrad", "constant: 0.5") for i in range(number))
    features = "".join(f'feature_descriptor {{ name: "f{i}" table_id: {i} input_shape: 8 }}\n' for i in range(number))
    return tables + features


def own_settings(number):
    settings = "".join(f'table {{ name: "t{i}" }} feature {{ name: "f{i}" }}\n' for i in range(number))
    return f"tpu_embedding_configuration {{ {many_tables(number)} }} {settings}"


def others_settings(number):
    return (
        own_settings(number)
        .replace('feature { name: "f', 'feature { name: "g')
        .replace('table { name: "t', 'table { name: "u')
    )


@pytest.mark.sampled("many_tables")
@pytest.mark.parametrize("text", [many_tables, own_settings, others_settings])
def test_the_work_of_a_check_grows_with_the_number_of_tables_and_not_its_square(text, tmp_path):
    path = tmp_path / "many.pbtxt"

    def calls(number):
        path.write_text(text(number))
        profile = cProfile.Profile()
        config, _ = profile.runcall(EmbeddingConfig.check, path)
        for name in () if config is None else config.table_names:
            profile.runcall(config.table, name)
        return sum(entry.callcount for entry in profile.getstats())

    calls(2)
    assert calls(800) < 4.6 * calls(200)


def test_a_step_counter_shares_the_tags():
    counter = TABLE.replace("%s { }", "frequency_aware_adagrad { step_counter { tag: 1 } }", 1) % ("b", "constant: 1")
    assert plain(TABLE % ("a", "adagrad", "dynamic { }") + counter.replace("%s", "")).num_tags == 2
    with pytest.raises(ConfigError, match="table 'b': dynamic tag 1"):
        plain(counter)
