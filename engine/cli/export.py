"""``penstock export``: write the tables of a checkpoint for other libraries."""

from __future__ import annotations

import argparse

from penstock.base.errors import UsageError
from penstock.base.flag_values import local_path
from penstock.checkpoint.arrays import EncodedTables, SavedTables
from penstock.checkpoint.manifests import VECTORS
from penstock.cli.command_line import Parser
from penstock.cli.output import Output, place_text, several, writing
from penstock.io.table_formats.table_format import table_formats
from penstock.model.row_encodings import ENCODINGS, FLOAT32

EXAMPLE = "penstock export run1 model.pt --format torch"
ROWS_HELP = "how rows are stored (default: float32); bfloat16 and int8 are for serving, and have no slots"


def add(command: Parser) -> None:
    outs = [each for each in table_formats() if each.write is not None]
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or DIR@VERSION")
    texts = "; ".join(f"{each.name}: {each.out}" for each in outs)
    command.add_argument("out", metavar="OUT", type=local_path, help=texts)
    names = [each.name for each in outs]
    command.add_argument("--format", choices=names, default=names[0], help="default: parquet, as --out writes it")
    command.add_argument("--rows", choices=ENCODINGS, default=FLOAT32.name, help=ROWS_HELP)


def run(args: argparse.Namespace, out: Output) -> None:
    chosen = next(each for each in table_formats() if each.name == args.format)
    saved = SavedTables(args.checkpoint)
    for name in saved.tables:
        if not chosen.has_keys and saved.keys(name) is not None:
            raise UsageError(f"table '{name}' is dynamic, and {chosen.title} has no keys; use parquet")
    step, rows = saved.commit.contents["global_step"], ENCODINGS[args.rows]
    tables = saved if rows is FLOAT32 else EncodedTables(saved, rows)
    assert chosen.write is not None
    with writing(args.out):
        files = chosen.write(args.out, tables, step)
    out.say_tables("wrote     ", [str(file) for file in files])
    readers = "import refuses them" if rows is FLOAT32 else "readers get no numbers"
    for name, (num_rows, first) in tables.not_finite.items():
        bad = f"{several(num_rows, 'row')} infinite or NaN, the first of id {first}; {readers}"
        out.say(f"warning   {name}: {bad} (docs/bad_rows.md)")
    for name, (path, _) in saved.commit.contents.get(VECTORS, {}).items():
        if saved.keys(name) is not None:
            has = several(saved.num_rows(name), "key")
            out.say(f"note      {name}: it has {has}; all others read their vectors in {path}, which are not exported")
    out.say(f"step      {step}, commit {saved.commit.number} of {place_text(args.checkpoint)}")
    if rows is not FLOAT32:
        out.say(f"rows      {rows.name}, without slots")
    result = {"global_step": step, "commit": saved.commit.number, "out": [str(file) for file in files]}
    result |= {"rows": rows.name}
    out.result({**result, "not_finite": {name: num_rows for name, (num_rows, _) in tables.not_finite.items()}})
