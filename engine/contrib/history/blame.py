"""``penstock blame``: list the frames of a log that contain one row, with the step that they entered."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

import penstock.base.interrupts as interrupts
from penstock.base.errors import UsageError, listed
from penstock.base.flag_values import local_path
from penstock.cli.arrow_file import write_arrow
from penstock.cli.command_line import Parser, add_flags, add_sources, check_reading, keywords_of, policy_of
from penstock.cli.output import Output, count, several
from penstock.core.trial_gate import TrialGate
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.sources.opening import check_not_read
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.id_ranges import bounds, expected
from penstock.model.config.proto_views import table_messages
from penstock.model.frames import Contributor, Frame
from penstock.model.options import OneReaderOptions, ReadingOptions
from penstock.model.stats import too_stale
from penstock.model.workers import frame_in_rounds

EXAMPLE = "penstock blame tables.pbtxt monday.arrows --table user --id 4711 --num-required 4"
_MOST_LINES = 100


def add(command: Parser) -> None:
    add_sources(command)
    command.add_argument("--id", required=True, type=int, metavar="N", help="the id of the row")
    command.add_argument("--out", type=local_path, metavar="FILE", help="also write an Arrow stream, or FILE.arrow")
    add_flags(command, "check")


@dataclass
class BlamedFrame:
    """A frame that contains the row.

    frame : its index in the source, from 0; step : the producer's
    opening : the global step that it led to; None: it is stale, or waits in the gate
    rows : its rows of the id; norm : the Euclidean norm of their sum, in float64
    """

    source: str
    frame: int
    contributor: Contributor
    step: int | None
    opening: int | None
    stale: bool
    rows: int
    norm: float


def run(args: argparse.Namespace, out: Output) -> None:
    drops_bad_rows, _ = check_reading(args)  # reported before the configuration is read
    check_not_read(args.sources, [] if args.out is None else [args.out])
    config = EmbeddingConfig.load(args.config)
    table = _table_of(config, args.table)
    policy = policy_of(args, config)
    keywords = keywords_of(args, "check", ReadingOptions, OneReaderOptions) | {
        "on_bad_row": "drop" if drops_bad_rows else "error",
        "merge": policy.merge(args.merge),
    }
    options = ReadOptions.of_config(config, keywords, num_tags=None, unvalidated=True, verifies=False)
    key, until = _key_of(config, table, args.id), _first_step(config, table)
    reader = FrameReader(args.sources, options)
    blamed, waiting = list[BlamedFrame](), list[tuple[int, BlamedFrame]]()

    def on_open() -> None:
        step = trial.gate.global_step
        for turn, frame in waiting:
            frame.opening = step + 1 if turn == step else None
        waiting[:] = [entry for entry in waiting if entry[0] != step]

    trial, names = TrialGate(policy, None, on_open), policy.names_of_sources(len(reader.sources))
    read, rows, stale_rows = Counter[int](), 0, 0
    with closing(reader.numbered()) as numbered:
        for number, frame in islice(numbered, args.limit):
            interrupts.check()
            if policy.workers is not None:
                frame = frame_in_rounds(frame, number, names)
            if frame.is_void:
                continue
            entry = _blamed(frame, table, key, reader.sources[number].name, read[number])
            if entry is not None:
                blamed.append(entry)
            read[number] += 1
            rows += frame.num_rows
            if trial.admit(frame)[1]:
                if entry is not None and trial.turn < until:
                    blamed.pop()  # the table was frozen
                elif entry is not None:
                    waiting.append((trial.turn, entry))
            else:
                stale_rows += frame.num_rows
                if entry is not None:
                    entry.stale = True
            trial.open()
    if args.flush:
        trial.open(early=True)
    _say(out, args, blamed, read.total(), rows)
    notes = reader.notes()
    if reader.without_table:
        guess = f"rows of {listed(reader.without_table)} name no table, and count as those of '{table}'"
        notes.append(f"{guess}: right only if it was replayed with --table {table}")
    out.say_all("note      ", notes)
    if (problem := too_stale(stale_rows, rows, args.max_stale)) is not None:
        out.say(f"note      {problem}")
    if args.out is not None:
        _write(args.out, blamed)
        out.say(f"wrote     {args.out}")
    frames = [{**asdict(frame), "norm": str(frame.norm)} for frame in blamed]
    out.result(
        {
            "table": table,
            "id": args.id,
            "read": {"frames": read.total(), "rows": rows},
            "frames": frames,
            "notes": notes,
        }
    )


def _table_of(config: EmbeddingConfig, name: str | None) -> str:
    names = list(config.id_ranges)
    if name is None and len(names) > 1:
        raise UsageError(f"--table: name the table of the row: {listed(names)}")
    return name or names[0]  # ReadOptions checks that it exists


def _first_step(config: EmbeddingConfig, table: str) -> int:
    """Return the first step that changes a table. Raises UsageError if none ever does."""
    for message in table_messages(config.to_engine_proto()):
        if message.name == table and message.is_never_trained:
            raise UsageError(f"--table: '{table}' is frozen, so no gradient has changed it")
        if message.name == table:
            return message.until_step or 0
    return 0


def _key_of(config: EmbeddingConfig, table: str, row_id: int) -> int:
    """Return the id as frames have it: a uint64 key as an int64 of its bits. Raises UsageError."""
    size, _ = config.id_ranges[table]
    least, end = bounds(size)
    if not least <= row_id < end:
        raise UsageError(f"--id: table '{table}': expected {expected(size)}, got {row_id}")
    return row_id - 2**64 if row_id >= 2**63 else row_id


def _blamed(frame: Frame, table: str, key: int, source: str, number: int) -> BlamedFrame | None:
    """Return the frame's part in a row; None if it has no row of the key. number : of the frame in its source"""
    total, num_rows = None, 0
    for rows in frame.rows.get(table, ()):
        matches = np.flatnonzero(rows.ids == key)
        if len(matches):
            summed = rows.gradient(matches).sum(axis=0, dtype=np.float64)
            total = summed if total is None else total + summed
            num_rows += len(matches)
    if total is None:
        return None
    norm = float(np.linalg.norm(total))
    return BlamedFrame(source, number, frame.contributor, frame.local_step, None, False, num_rows, norm)


def _say(out: Output, args: argparse.Namespace, blamed: list[BlamedFrame], frames: int, rows: int) -> None:
    out.say(
        f"read      {count(rows)} rows in {count(frames)} frames; ids only, checksums and other rows were not checked"
    )
    total = sum(frame.rows for frame in blamed)
    out.say(f"id {args.id}: {several(total, 'row')} in {several(len(blamed), 'frame')}")
    for frame in blamed[:_MOST_LINES]:
        state = "stale" if frame.stale else "pending" if frame.opening is None else f"step {frame.opening}"
        producer = "" if frame.contributor is None else f" of {frame.contributor}"
        local = "" if frame.step is None else f", its step {frame.step}"
        place = f"{frame.source}: frame {frame.frame}{producer}{local}"
        out.say(f"  {state:9} {place}: {several(frame.rows, 'row')}, norm {frame.norm:.6g}")
    if len(blamed) > _MOST_LINES:
        out.say(f"  … {count(len(blamed) - _MOST_LINES)} more (--json, --out)")


def _write(path: Path, blamed: Iterable[BlamedFrame]) -> None:
    fields = {"source": pa.utf8(), "frame": pa.int64(), "contributor": pa.utf8(), "step": pa.int64()}
    fields |= {"opening": pa.int64(), "stale": pa.bool_(), "rows": pa.int64(), "norm": pa.float64()}
    names = [None if frame.contributor is None else str(frame.contributor) for frame in blamed]
    write_arrow(
        path, [asdict(frame) | {"contributor": name} for frame, name in zip(blamed, names, strict=True)], fields
    )
