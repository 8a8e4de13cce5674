"""``penstock synth``: what it prints, and what it refuses."""

import importlib
import json
import os

import pyarrow as pa
import pyarrow.ipc
import pytest

command_line = importlib.import_module("penstock.cli.main")


@pytest.fixture
def penstock(monkeypatch):
    """The command line, with this command only: the others load jax."""
    monkeypatch.setattr(command_line, "COMMANDS", {"synth": command_line.COMMANDS["synth"]})
    return command_line.main


def test_the_command_reports_what_it_wrote_and_what_to_run_next(tmp_path, penstock, capsys):
    out = tmp_path / "my log.arrows"
    assert penstock(["synth", str(out), "--rows", "1000", "--rows-per-step", "300"]) == 0
    text = capsys.readouterr().out
    assert f"{out}: 1,000 rows in 4 steps" in text
    assert f"penstock replay '{tmp_path / 'my log.pbtxt'}' '{out}' --out tables" in text


def test_hashed_ids_are_reported_with_the_capacity_of_their_table(tmp_path, penstock, capsys):
    flags = ["--rows", "100", "--rows-per-step", "100", "--vocabulary", "40", "--dim", "4", "--ids", "hashed"]
    assert penstock(["synth", str(tmp_path / "log.arrows"), *flags, "--json"]) == 0
    captured = capsys.readouterr()
    assert "log.arrows: 100 rows in 1 step, " in captured.err
    assert "table     table_0: 51 × 4, 100 rows, 40 keys at any time\n" in captured.err
    assert "vocabulary_size: 51\n" in (tmp_path / "log.pbtxt").read_text()
    (table,) = json.loads(captured.out)["tables"]
    assert (table["vocabulary_size"], table["vocabulary"]) == (51, 40)


def test_json_is_one_object_and_text_goes_to_stderr(tmp_path, penstock, capsys):
    out = tmp_path / "log.parquet"
    assert penstock(["synth", str(out), "--rows", "1000", "--rows-per-step", "300", "--tables", "2", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert (result["rows"], result["steps"], result["bytes"]) == (1000, 4, out.stat().st_size)
    assert (result["log"], result["config"]) == (str(out), str(tmp_path / "log.pbtxt"))
    assert [t["name"] for t in result["tables"]] == ["table_0", "table_1"]
    assert sum(t["rows"] for t in result["tables"]) == 1000
    assert str(out) in captured.err


def test_ten_of_many_tables_are_listed(tmp_path, penstock, capsys):
    assert penstock(["synth", str(tmp_path / "log.arrows"), "--tables", "100", "--rows", "100"]) == 0
    text = capsys.readouterr().out
    assert text.count("table_") == 10
    assert "table     … 90 more\n" in text


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--rows", "-1"),
        ("--rows-per-step", "0"),
        ("--tables", "0"),
        ("--vocabulary", "0"),
        ("--vocabulary", "2147483649"),
        ("--dim", "0"),
        ("--seed", "-1"),
        ("--alpha", "nan"),
        ("--alpha", "inf"),
        ("--alpha", "-0.5"),
        ("--rows", "1" + "0" * 30),
        ("--churn", "-1"),
        ("--churn", "nan"),
    ],
)
def test_a_value_out_of_range_is_one_line_and_exit_code_2(tmp_path, penstock, capsys, flag, value):
    assert penstock(["synth", str(tmp_path / "log.arrows"), flag, value]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"penstock: {flag}: expected ")
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("arguments", [["--distribution", "pareto"], ["--rows", "many"], ["--no-such-flag"]])
def test_flags_that_cannot_be_parsed_are_one_line_and_exit_code_2(tmp_path, penstock, capsys, arguments):
    assert penstock(["synth", str(tmp_path / "log.arrows"), *arguments]) == 2
    error = capsys.readouterr().err
    assert arguments[0] in error
    assert error.count("\n") == 1


def test_dense_ids_cannot_churn(tmp_path, penstock, capsys):
    assert penstock(["synth", str(tmp_path / "log.arrows"), "--churn", "0.5"]) == 2
    assert "--churn: dense ids cannot be replaced; add --ids hashed" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["-", "log.pbtxt", "log.csv", "pipe"])
def test_a_name_that_cannot_be_the_log_is_exit_code_2(tmp_path, penstock, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert penstock(["synth", name]) == 2
    assert capsys.readouterr().err.startswith("penstock: OUT: ")
    assert os.listdir(".") == ["pipe"]


@pytest.mark.parametrize("name", ["missing/log.arrows", "."])
def test_an_unwritable_log_is_exit_code_6_and_its_path_is_in_the_error(tmp_path, penstock, capsys, name):
    assert penstock(["synth", str(tmp_path / name)]) == 6
    assert capsys.readouterr().err.startswith(f"penstock: {tmp_path / name}: cannot write: ")


def test_a_failed_write_leaves_the_previous_log(tmp_path, penstock, capsys, monkeypatch):
    out = tmp_path / "log.arrows"
    out.write_bytes(b"before")

    def no_space(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        assert penstock(["synth", str(out)]) == 6
    assert capsys.readouterr().err == f"penstock: {out}: cannot write: no space left on device; free some space\n"
    assert out.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["log.arrows"]
    assert penstock(["synth", str(out), "--rows", "10"]) == 0
    assert pa.ipc.open_stream(out).read_all().num_rows == 10
