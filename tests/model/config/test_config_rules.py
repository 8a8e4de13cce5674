"""What loading checks, next to the rules of test_lint_codes.py: long names, many tables, and shared tags."""

import cProfile

import pytest
from text_configs import PLAIN, TABLE, plain

from penstock.base.errors import ConfigError
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import TableConfig
from penstock.model.updates import SGD


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
