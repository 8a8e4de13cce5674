"""``penstock synth``: write a synthetic gradient log, and a configuration that fits it."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import fields

from penstock.base.flag_values import local_path, whole
from penstock.cli.command_line import Parser
from penstock.cli.output import Output, count, several, writing
from penstock.io.synth import (
    DISTRIBUTIONS,
    DLRM_DIMS,
    DLRM_TABLES,
    IDS,
    SynthOptions,
    Written,
    write_synthetic,
)

EXAMPLE = "penstock synth log.arrows --rows 1000000 --vocabulary 1000000 --distribution zipf --alpha 1.2"


def add(command: Parser) -> None:
    default = SynthOptions()
    command.add_argument(
        "out",
        metavar="OUT",
        type=local_path,
        help="the log: .parquet is Parquet, .arrow and .feather an Arrow IPC file, anything else an Arrow IPC stream; "
        "the configuration has the suffix .pbtxt",
    )
    numbers = {
        "--rows": (default.rows, "gradient rows in all"),
        "--rows-per-step": (default.rows_per_step, "of one step: one frame"),
        "--tables": (None, f"number of tables (default 1, for dlrm {DLRM_TABLES})"),
        "--vocabulary": (default.vocabulary, "ids of every table; of the largest for dlrm"),
        "--dim": (default.dim, f"of every table; dlrm ignores it, its dims cycle {', '.join(map(str, DLRM_DIMS))}"),
        "--seed": (default.seed, "the same options with the same seed give the same bytes"),
    }
    for flag, (value, text) in numbers.items():
        text += f" (default {value})" if value is not None else ""
        command.add_argument(flag, type=whole(), default=value, metavar="N", help=text)
    command.add_argument(
        "--distribution",
        choices=DISTRIBUTIONS,
        default=default.distribution,
        help=f"of the ids (default {default.distribution}). zipf and dlrm need 8 bytes of memory per id of the "
        "vocabulary; dlrm imitates the shape of production traces (many uneven tables), it is not their data",
    )
    command.add_argument(
        "--alpha",
        type=float,
        default=default.alpha,
        metavar="A",
        help=f"exponent of zipf, the tables' mean for dlrm; uniform ignores it (default {default.alpha})",
    )
    command.add_argument(
        "--ids",
        choices=IDS,
        default=default.ids,
        help="dense: below the vocabulary; hashed: any 64-bit integer, and the tables of the configuration are dynamic "
        f"(default {default.ids})",
    )
    command.add_argument(
        "--churn",
        type=float,
        default=default.churn,
        metavar="R",
        help="of hashed ids: the share of the vocabulary that new keys replace from the first step to the last; more "
        f"than 1 replaces every key several times (default {default.churn:g})",
    )


def run(args: argparse.Namespace, out: Output) -> None:
    options = SynthOptions(**{field.name: getattr(args, field.name) for field in fields(SynthOptions)})
    with writing(args.out):
        written = write_synthetic(args.out, options)
    say_written(out, written)


def say_written(out: Output, written: Written) -> None:
    """Print which files were written, and a command that replays them."""
    rows, log, config = sum(written.rows.values()), str(written.log), str(written.config)
    replay = shlex.join(["penstock", "replay", config, log, "--out", "tables"])
    steps = several(written.num_steps, "step")
    out.say(f"wrote     {log}: {count(rows)} rows in {steps}, {written.num_bytes / 1e6:.1f} MB")
    out.say(f"wrote     {config}: configuration, Adagrad")
    texts, tables = [], []
    for table in written.tables:
        capacity, num_rows = written.capacities[table.name], written.rows[table.name]
        text = f"{table.name}: {count(capacity)} × {table.dim}, {count(num_rows)} rows"
        if capacity != table.vocabulary_size:
            text += f", {count(table.vocabulary_size)} keys at any time"
        texts.append(text)
        sizes = {"vocabulary_size": capacity, "dim": table.dim, "rows": num_rows, "vocabulary": table.vocabulary_size}
        tables.append({"name": table.name, **sizes})
    out.say_tables("table     ", texts)
    out.say(f"try       {replay}")
    out.result(
        {
            "log": log,
            "config": config,
            "rows": rows,
            "steps": written.num_steps,
            "bytes": written.num_bytes,
            "tables": tables,
            "replay": replay,
        }
    )
