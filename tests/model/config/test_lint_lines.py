"""Findings of a text file name their line, also for numbers that float32 changes; ``validate`` prints them."""

import re

import pytest
from text_configs import GOOD, engine_text

import penstock
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.lint import lint
from penstock.model.config.text_format import read


def written(tmp_path, text):
    path = tmp_path / "c.pbtxt"
    path.write_text(text)
    message, scan = read(path)
    assert scan is not None
    return lint(message, scan.numbers, (), scan)


@pytest.mark.parametrize(
    ("old", "new", "line", "match"),
    [
        ("adagrad { }", "adam { beta1: 0.9\n beta2: 0.99999999 epsilon: 1e-7 }", 8, r"1 - beta2 is 0 and not 1e-08"),
        ("adagrad { }", "lion { beta2: 0.9999999 }", 7, r"becomes 0.9999998\d+ in float32, so 1 - beta2 is 1.19e-07"),
        ("constant: 0.5", "constant: 1e-46", 8, "is too small for float32, and counts as 0"),
        ("adagrad { }", "adagrad { } clipping_limits { upper { value: 1e39 } }", 7, "too large for float32"),
    ],
)
def test_a_number_of_a_text_that_float32_changes_is_found_on_its_line(tmp_path, old, new, line, match):
    (finding,) = [f for f in written(tmp_path, GOOD.replace(old, new)) if f.code == "PS211"]
    assert finding.line == line
    assert re.search(match, finding.message)


def test_a_number_that_is_only_rounded_is_not_worth_a_word(tmp_path):
    text = GOOD.replace("adagrad { }", "adam { beta1: 0.9 beta2: 0.999 epsilon: 1e-7 }").replace("0.5", "0.1")
    assert written(tmp_path, text) == []


def test_a_number_of_a_python_class_that_float32_changes_is_found():
    table = penstock.TableConfig(10, 4, name="a")
    config = EmbeddingConfig.from_tables([table], penstock.Adam(0.1, beta_2=0.99999999))
    assert {finding.code for finding in config.lint()} == {"PS211", "PS212"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (GOOD.replace("adagrad { }", "adagrad { }\n\n weight_decay_factor: 1"), 9),
        (
            GOOD.replace("dimension", '# } { "\n dimension').replace(
                "adagrad { }", "adagrad <>,weight_decay_factor: 1;"
            ),
            8,
        ),
        (engine_text("", GOOD.replace("adagrad { }", "adagrad { }\n weight_decay_factor: 1")), 8),
        (
            "mode: TRAINING table_descriptor: [{\n name: 'x' '}' vocabulary_size: 0x10 dimension: 1\n"
            "optimization_parameters { adagrad { }\nweight_decay_factor: 1 learning_rate { constant: 1f } } }]",
            4,
        ),
    ],
)
def test_findings_of_a_text_say_their_line(tmp_path, text, line):
    assert [(f.code, f.line) for f in written(tmp_path, text)] == [("PS204", line)]


def test_a_missing_field_has_the_line_of_its_message(tmp_path):
    (finding,) = written(tmp_path, GOOD.replace("vocabulary_size: 10\n", "\n"))
    assert (finding.code, finding.line) == ("PS004", 2)
    (finding,) = written(tmp_path, GOOD.replace("mode: TRAINING", ""))
    assert (finding.code, finding.line) == ("PS101", None)


def test_the_second_of_two_tables_has_its_own_line(tmp_path):
    second = GOOD.replace('"a"', '"b"').replace("mode: TRAINING", "").replace("0.5", "0")
    (finding,) = written(tmp_path, GOOD + second)
    assert (finding.where.split(".")[0], finding.line) == ("table_descriptor[1]", 19)


def test_validate_prints_the_findings_of_a_file_that_loading_refuses(tmp_path, call):
    path = tmp_path / "c.pbtxt"
    path.write_text(GOOD.replace("10", "0").replace("4", "0"))
    _, printed = call(4, "validate", path)
    assert [(f["code"], f["line"]) for f in printed["findings"]] == [("PS004", 4), ("PS005", 5)]
    assert printed["findings"][0] == {
        "code": "PS004",
        "severity": "error",
        "where": "table_descriptor[0].vocabulary_size",
        "message": "table 'a': vocabulary_size is 0",
        "fix": "set it to the number of rows, at least 1",
        "line": 4,
    }
    with pytest.raises(penstock.ConfigError, match="vocabulary_size is 0"):
        EmbeddingConfig.load(path)
