"""The command line as tests use it: configurations in text format, logs of a few rows, and what a command prints."""

import json
import re
import subprocess
import sys

import numpy as np
from batches import batch

from penstock.cli import main

COMMAND = [sys.executable, "-m", "penstock"]
SGD = "stochastic_gradient_descent {}"


def table(name="user", rows=50, dim=2, optimizer="adagrad {}", rate="constant: 0.1"):
    """The text of a table in a configuration."""
    return f"""
table_descriptor {{
  name: "{name}" vocabulary_size: {rows} dimension: {dim}
  optimization_parameters {{ {optimizer} learning_rate {{ {rate} }} gradient_accumulation_status: ENABLED }}
}}
"""


ONE_TABLE = table() + "mode: TRAINING\n"
TWO_TABLES = table() + table("item", 20, 2, SGD, "constant: 0.5") + "mode: TRAINING\n"


def frame(step=0, ids=(1, 2, 3, 1), worker=0, **columns):
    """Rows of two floats, the same for the same arguments. step : None for no such column; columns : more, or other"""
    values = np.random.default_rng([step or 0, worker]).standard_normal((len(ids), 2))
    return batch(ids, values, **{"step": step} | columns)


def unmarked(batch):
    """The same without step and contributor: each record batch is a frame, and none is ever stale."""
    return batch.drop_columns(["step", "contributor"])


def started(*words, **more):
    """A command in a separate process, its streams piped."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([*COMMAND, *map(str, words)], **(pipes | more))


def outcome(capsys, *words):
    """Run a command with --json in this process: its exit code, the object that it prints, and its standard error."""
    capsys.readouterr()
    code = main([*map(str, words), "--json"])
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    return code, json.loads(out), err


def error_line(capsys, code, *words):
    """The one line that a command fails with, with --json and without; it prints nothing else."""
    assert main([*map(str, words)]) == code
    out, line = capsys.readouterr()
    assert out == ""
    assert re.fullmatch("penstock: [^\n]+\n", line)
    assert outcome(capsys, *words) == (code, {"error": line[len("penstock: ") : -1], "exit_code": code}, line)
    return line
