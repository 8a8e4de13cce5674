"""The command line: flags, arguments, help, and configurations that cannot be used."""

import re

import pyarrow as pa
import pytest
from cli import TWO_TABLES, frame
from ipc import write

from penstock.cli import main
from penstock.cli.main import COMMANDS

CONFIG = TWO_TABLES


def edit_config(old, new):
    assert old in CONFIG
    return CONFIG.replace(old, new, 1)


CONFIG_WITH_TAG = edit_config("constant: 0.1", "dynamic { tag: 0 }")


@pytest.fixture
def log(tmp_path):
    """A stream of one frame for the table 'user', without a table column and without learning rates."""
    return write(tmp_path / "log.arrows", [frame(None, [1, 2])])


# ---- flags

BAD_FLAGS = {
    "--num-required 0": "at least 1",
    "--num-required -3": "at least 1",
    "--num-required two": "whole number, got 'two'",
    "--num-required 1.5": "whole number",
    "--workers -1": "at least 1",
    "--contribution-rows 0": "at least 1",
    "--limit -1": "at least 0",
    "--limit x": "whole number",
    "--devices 0": "at least 1",
    "--devices 100000": "at most 1024",
    "--threads 0": "at least 1",
    "--threads 100000": "at most 1024",
    "--seed x": "whole number, got 'x'",
    "--reduction max": "'max'",
    "--merge time": "'time'",
    "--gradient-dtype int8": "'int8'",
    "--on-bad-row ignore": "'ignore'",
    "--table usr": "'usr' is not in the configuration (user, item); did you mean 'user'?",
    "--column grad=gradient": "'grad'",
    "--column gradient": "ROLE=NAME",
    "--column gradient=": "ROLE=NAME",
    "--column id=a --column id=b": "given twice",
    "--learning-rate 0.1": "TAG=VALUE",
    "--learning-rate x=0.1": "TAG=VALUE",
    "--learning-rate 0=fast": "TAG=VALUE",
    "--learning-rate 0=": "TAG=VALUE",
    "--learning-rate 1=0.1": "tag 1",
    "--learning-rate -1=0.1": "learning",  # Python 3.14 takes -1=0.1 for a value
    "--learning-rate 0=nan": "finite",
    "--learning-rate 0=inf": "finite",
    "--learning-rate 0=1 --learning-rate 0=2": "given twice",
    "--sead 3": "unknown flag --sead; did you mean --seed?",
    "--num 3": "unknown flag --num; did you mean --num-required?",
    "--passes auto": "unknown flag --passes; it is a flag of penstock passes (",
    "--ray auto": "unknown flag --ray; it is a flag of penstock job (",
    "--deltas-last": "unknown flag --deltas-last; did you mean --delta-last?",
    "--deltas-slots all": "unknown flag --deltas-slots; did you mean --delta-slots?",
    "--seed": "--seed",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_a_bad_flag_exits_with_2_and_names_the_expected_value(flags, tmp_path, log, refused):
    path = tmp_path / "tables.pbtxt"
    path.write_text(CONFIG_WITH_TAG)
    assert BAD_FLAGS[flags] in refused(2, "replay", path, log, "--out", tmp_path / "out", *flags.split())


def test_too_many_or_too_few_arguments_exit_with_2(config, log, refused):
    assert "penstock replay --help" in refused(2, "replay", config)
    assert "unexpected argument" in refused(2, "inspect", log, log)
    assert "once" in refused(2, "replay", config, "-", "-")
    assert "once" in refused(2, "validate", config, "-", "-")


def test_a_missing_or_unknown_command_exits_with_2(capsys):
    for argv in ([], ["repaly"]):
        assert main(argv) == 2
        text = capsys.readouterr()
        assert text.out == ""
        assert re.fullmatch(r"penstock: [^\n]*replay[^\n]*\n", text.err)


def test_a_flag_before_the_command_is_reported_with_a_hint(capsys):
    for arguments, message in ((["--versoin"], "did you mean --version?"), (["--json", "replay"], "come after it")):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_validate_requires_a_configuration_and_nothing_else(capsys):
    assert main(["validate"]) == 2
    assert "required: CONFIG (" in capsys.readouterr().err


def test_sources_may_stand_on_both_sides_of_a_flag(config, log, call):
    assert call(0, "replay", config, log, "--table", "user", log)[1]["frames"] == 2
    assert len(call(0, "validate", config, "--table", "user", log)[1]["sources"]) == 1


@pytest.mark.parametrize("argv", [[], *([name] for name in COMMANDS)])
def test_help_shows_an_example_that_begins_with_the_command(argv, capsys):
    assert main([*argv, "--help"]) == 0
    text = capsys.readouterr()
    assert text.err == ""
    assert f"\nexample:\n  {' '.join(['penstock', *argv])} " in text.out.rstrip() + " "


def test_version_prints_the_version_of_the_package(capsys):
    import penstock

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


# ---- folders that cannot be written to, or initialized from


def test_out_on_or_below_a_file_exits_with_6_and_names_the_file(config, log, refused):
    for out in (log, f"{log}/deeper/still"):
        line = refused(6, "replay", config, log, "--table", "user", "--out", out)
        assert line == f"penstock: {log}: cannot write: is not a directory; give another directory\n"
    assert "cannot write" in refused(6, "demo", "--dir", log)


def test_init_without_tables_exits_with_3(config, log, tmp_path, refused):
    line = refused(3, "replay", config, log, "--table", "user", "--init", tmp_path / "nowhere")
    assert f"{tmp_path / 'nowhere'}: no such file or folder" in line


# ---- configurations

BAD_CONFIGS = {
    "tag gap": (edit_config("constant: 0.1", "dynamic { tag: 1 }"), ["tag"]),
    "dynamic tag without a value": (CONFIG_WITH_TAG, ["--learning-rate 0=VALUE"]),
    "optimizer without a formula": (
        edit_config("adagrad {}", "mdl_adagrad_light {}"),
        ["mdl_adagrad_light", "cannot be run"],
    ),
    "mode INFERENCE": (edit_config("TRAINING", "INFERENCE"), ["INFERENCE", "TRAINING"]),
    "unknown text field": (edit_config("dimension", "dimensoin"), ["tables.pbtxt:3:", "'dimensoin'", "dimension"]),
    "empty": ("", ["tables.pbtxt", "empty"]),
    "no rows": (edit_config("vocabulary_size: 50", "vocabulary_size: 0"), ["vocabulary_size", "user"]),
    "two tables of one name": (edit_config('"item"', '"user"'), ["'user'"]),
    "prose": ("Dear diary,", ["tables.pbtxt:1:"]),
    "a table larger than memory": (edit_config("vocabulary_size: 50", f"vocabulary_size: {1 << 60}"), ["memory"]),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_bad_configuration_exits_with_4_or_6_and_gives_the_reason(name, log, tmp_path, refused):
    content, fragments = BAD_CONFIGS[name]
    path = tmp_path / "tables.pbtxt"
    path.write_text(content)
    line = refused(6 if "memory" in name else 4, "replay", path, log, "--table", "user")
    for fragment in fragments:
        assert fragment in line


def test_a_missing_configuration_or_one_of_another_format_exits_with_4(log, tmp_path, refused):
    assert "nowhere.pbtxt: no such file" in refused(4, "replay", tmp_path / "nowhere.pbtxt", log)
    assert "Arrow" in refused(4, "replay", log, log)
    assert "directory" in refused(4, "replay", tmp_path, log)
    assert "nowhere.pbtxt" in refused(4, "validate", tmp_path / "nowhere.pbtxt", log)


def test_a_learning_rate_column_of_the_wrong_length_exits_with_3(tmp_path, refused):
    path = tmp_path / "tables.pbtxt"
    path.write_text(CONFIG_WITH_TAG)
    rates = pa.array([[0.1], [0.1, 0.2]], pa.list_(pa.float32()))
    log = write(tmp_path / "log.arrows", [frame(None, [1, 2], learning_rates=rates)])
    assert "batch 0, row 1, column 'learning_rates'" in refused(3, "replay", path, log, "--table", "user")
