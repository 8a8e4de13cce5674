"""``penstock import``: start a checkpoint with the tables of another library."""
# ruff: noqa: N999 (the module has the command's name)

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.api.engine import Engine
from penstock.base.flag_values import local_path, whole
from penstock.checkpoint.store import Folder
from penstock.checkpoint.versions import check_new, check_no_version
from penstock.cli.command_line import Pairs, Parser, add_flag, make_devices
from penstock.cli.output import Output, check_writable, place_text, several, writing
from penstock.io.table_formats.table_format import format_of, table_formats
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.updates import Optimizer
from penstock.rows.chosen_optimizers import with_chosen_optimizers
from penstock.rows.table_io import LoadedTables

EXAMPLE = "penstock import model.pt run1 --config tables.pbtxt --map user_embedding=user"


def add(command: Parser) -> None:
    titles = "; ".join(each.title for each in table_formats())
    command.add_argument("source", metavar="SOURCE", nargs="+", type=local_path, help=titles)
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="a new or empty folder, or a URI")
    command.add_argument("--config", required=True, metavar="CONFIG", help="the configuration of the tables")
    command.add_argument(
        "--map",
        action=Pairs,
        default={},
        dest="names",
        metavar="NAME=TABLE",
        help="the name in the source of a table, or of the tensor with the weights of TABLE or with TABLE/SLOT; "
        "a * on each side stands for the same text",
    )
    command.add_argument(
        "--new-config",
        type=local_path,
        metavar="FILE",
        help="take the optimizers of torch's and torchrec's states instead of CONFIG's, and write the configuration "
        "with them to FILE, for the runs that continue; CONFIG may leave them out",
    )
    command.add_argument(
        "--step",
        type=whole(0, 2**63 - 1),
        metavar="N",
        help="the step that the checkpoint begins at; default: that of the source's optimizers where the rate of an "
        "update depends on it, else 0",
    )
    for name in ("new_tables", "learning_rates", "seed", "num_required", "reduction", "devices", "threads"):
        add_flag(command, name)


def run(args: argparse.Namespace, out: Output) -> None:
    check_no_version(args.checkpoint)
    folder = Folder(args.checkpoint)
    check_new(folder)
    check_writable(args.checkpoint if "://" in args.checkpoint else Path(args.checkpoint))
    if args.new_config is None:
        config, chosen = EmbeddingConfig.load(args.config), dict[str, Optimizer]()
        for source in args.source:
            format_of(source)  # before the tables are allocated
    else:
        check_writable(args.new_config.absolute().parent)
        config, chosen = with_chosen_optimizers(args.config, args.source, args.names)
    gate = {"num_required": args.num_required, "reduction": args.reduction}
    engine = Engine(config, make_devices(args.devices), seed=args.seed, threads=args.threads, **gate)
    loaded = engine.read_tables(args.source, args.new_tables, args.names, args.learning_rates)
    if step := (loaded.step if args.step is None else args.step):
        engine.gate.set_global_step(step)
    with writing(args.checkpoint):
        engine.save(args.checkpoint)
    if args.new_config is not None:
        with writing(args.new_config):
            config.save(args.new_config)
        out.say_tables("chose     ", [f"{name}: {_text(optimizer)}" for name, optimizer in chosen.items()])
    _say(out, args, loaded)
    sources = [str(source) for source in args.source]
    result = {"checkpoint": place_text(args.checkpoint), "sources": sources, **loaded.to_dict()}
    chosen_texts = {name: _text(optimizer) for name, optimizer in chosen.items()}
    out.result(result | {"step": engine.global_step, "chosen": chosen_texts})


def _text(optimizer: Optimizer) -> str:
    """Return an optimizer as it is created, with its rate and the numbers of its message."""
    numbers = {"learning_rate": optimizer.learning_rate, **optimizer.proto_values()}
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value}' for name, value in numbers.items())})"


def _say(out: Output, args: argparse.Namespace, loaded: LoadedTables) -> None:
    lines = []
    for table, parts in loaded.tables.items():
        texts = [f"{part} of '{name}'" for part, name in parts.items()]
        lines.append(f"{table}: {several(loaded.rows.get(table, 0), 'row')}: {', '.join(texts)}")
    out.say_tables("took      ", lines)
    out.say_tables("initial   ", [f"{table}: {', '.join(parts)}" for table, parts in loaded.initial.items()])
    derived = [f"{place}: {several(number, 'row')}, from the weights" for place, number in loaded.derived.items()]
    out.say_tables("derived   ", derived)
    raised = [f"{place}: {several(number, 'zero')}, by which updates divide" for place, number in loaded.raised.items()]
    out.say_tables("raised    ", raised)
    out.say_tables("skipped   ", [f"{name}: {reason}" for name, reason in loaded.skipped.items()])
    out.say_all("note      ", loaded.notes)
    if loaded.step is not None and args.step is None:
        out.say(f"step      {loaded.step:,}, of the optimizers there")
    out.say(f"wrote     {place_text(args.checkpoint)}")
