"""``penstock validate``: a configuration linted, sources read to their end against it, nothing applied."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.cli.options import add_command, add_reading_options, check_sources, columns_of
from penstock.cli.output import Output, count, several, size_text
from penstock.config.embedding import EmbeddingConfig
from penstock.errors import InputError
from penstock.io.reader import FrameReader, ReadOptions


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "validate",
        run,
        "check a configuration, and sources against it, without applying anything",
        "penstock validate tables.pbtxt monday.arrows",
    )
    command.add_argument("config", metavar="CONFIG", help="TPUEmbeddingConfiguration or EngineConfig, text or binary")
    command.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="*",
        default=[],
        help="Arrow IPC or Parquet file, directory, URI, or - for stdin",
    )
    add_reading_options(command)


VERDICTS = {
    0: "valid",
    3: "not valid: the sources have errors, listed above",
    4: "not valid: the configuration has errors, listed above",
}


def run(args: argparse.Namespace) -> int:
    out = Output(args.json)
    code = check_all(args, out)
    out.say(f"{'verdict':8}  {VERDICTS[code]}")
    return code


def check_all(args: argparse.Namespace, out: Output) -> int:
    """Check the configuration and every source, and report what is found. Returns the exit code."""
    columns = columns_of(args)
    check_sources(args.sources)
    config, findings = EmbeddingConfig.check(args.config)
    if config is not None:
        told = several(config.num_tags, "dynamic learning rate")
        out.say(f"{args.config}: {several(len(config.table_names), 'table')}, {told}")
    for finding in findings:
        place = finding.where if finding.line is None else f"line {finding.line}, {finding.where}"
        out.say(f"{finding.severity:8}  {finding.code}  {place}: {finding}")
    if not findings:
        out.say("good      nothing to remark on the configuration")
    memory: dict[str, Any] = {}
    if config is not None and not any(finding.severity == "error" for finding in findings):
        memory = say_memory(config, out)
    checked: list[dict[str, Any]] = []
    if config is None and args.sources:
        out.say(f"{'error':8}  the sources were not read: without a usable configuration there is nothing to check by")
    elif config is not None:
        options = ReadOptions(
            sizes=config.sizes,
            features=config.features,
            num_tags=config.num_tags,
            table=args.table,
            columns=columns,
            contribution_rows=args.contribution_rows,
            on_bad_row="drop",
            gradient_dtype=args.gradient_dtype,
            allow_missing_end=args.allow_missing_end,
        )
        checked = [check(source, options, out) for source in args.sources]
    of_config = {"config": args.config, "findings": [vars(f) for f in findings], "memory": memory}
    out.result({**of_config, "sources": checked})
    if any(source["errors"] for source in checked):
        return 3
    return 4 if any(finding.severity == "error" for finding in findings) else 0


def say_memory(config: EmbeddingConfig, out: Output) -> dict[str, Any]:
    """Report what the tables and their slots need; by table, in bytes, what the weights and the slots need."""
    memory = {spec.name: {"weights": spec.weights_bytes, "slots": spec.slots_bytes} for spec in config.tables}
    weights, slots = (sum(of[kind] for of in memory.values()) for kind in ("weights", "slots"))
    text = f"at least {size_text(weights + slots)} over all devices"
    text += f": weights {size_text(weights)}, slots {size_text(slots)}"
    if len(memory) > 1:
        most = max(memory, key=lambda name: sum(memory[name].values()))
        text += f"; most for '{most}', {size_text(sum(memory[most].values()))}"
    out.say(f"{'memory':8}  {text}")
    return memory


def check(source: str, options: ReadOptions, out: Output) -> dict[str, Any]:
    """Read one source to its end; count what is in it and what is wrong with it."""
    rows = frames = truncated = 0
    dropped: dict[str, int] = {}
    errors: list[str] = []
    first_bad: dict[str, str] = {}
    try:
        reader = FrameReader(source, options)
        first_bad = reader.first_bad
        for frame in reader:
            rows, frames, truncated = rows + frame.num_rows, frames + 1, truncated + frame.truncated
            for reason, number in frame.dropped.items():
                dropped[reason] = dropped.get(reason, 0) + number
    except InputError as error:
        errors.append(str(error))
    for reason, first in first_bad.items():  # of the frame in which reading ended, too
        number = dropped.get(reason, 0)
        errors.append(f"{count(number)} bad rows; first: {first}" if number else first)
    out.say(f"{'bad' if errors else 'good':8}  {source}: {count(rows)} rows in {count(frames)} frames read")
    if truncated:
        out.say(f"{'truncated':8}  {count(truncated)} ids beyond the length of their sequence")
    for text in errors:
        out.say(f"{'error':8}  {text}")
    return {
        "source": source,
        "rows": rows,
        "frames": frames,
        "truncated": truncated,
        "bad_rows": dropped,
        "errors": errors,
    }
