"""``penstock plan``: what settings of dynamic and of cached tables would do to a log."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from penstock.api.planning.choices import all_choices
from penstock.api.planning.comparison import NEVER, compared
from penstock.api.planning.forecast import Forecast
from penstock.api.planning.planner import EXACT_ROWS, Planner, reading
from penstock.base.flag_values import MOST_PARALLEL, number, whole
from penstock.cli.command_line import (
    Parser,
    add_flags,
    add_sources,
    check_reading,
    keywords_of,
    policy_of,
)
from penstock.cli.output import Output, ProgressLine, count, frames_text
from penstock.io.decoding.reader import FrameReader
from penstock.model.config.dynamic import MAX_COUNT
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.placement import MOST_BYTES
from penstock.model.options import OneReaderOptions, ReadingOptions

EXAMPLE = "penstock plan tables.pbtxt monday.arrows --capacity 1000000,2000000 --min-count 1,3 --expire never,500000"


def add(command: Parser) -> None:
    add_sources(command)
    choices = command.add_argument_group(
        "choices",
        "every combination is followed, in all dynamic and all cached tables (default: the configuration's settings)",
    )
    for flag, (parse, text) in _CHOICES.items():
        choices.add_argument(flag, type=_several(parse), default=[], metavar="N,…", help=text)
    choices.add_argument(
        "--sample",
        type=number("a share above 0, up to 1", 0, 1, with_least=False),
        metavar="SHARE",
        help="follow this share of the keys, rounded down to 1/2, 1/4, …, and estimate; 1: all (default: all, or what "
        f"{EXACT_ROWS // 1_000_000} million rows of all choices together have room for)",
    )
    add_flags(command, "check")
    machine = command.add_argument_group("machine")
    machine.add_argument("--seed", type=whole(), default=0, metavar="N", help="of the replay (default 0)")
    machine.add_argument(
        "--threads",
        type=whole(1, MOST_PARALLEL),
        metavar="N",
        help="threads of the host (default: one per CPU; results do not depend on it)",
    )


def _several(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse_several(text: str) -> list[Any]:
        return [parse(part) for part in text.split(",")]

    return parse_several


def _after(text: str) -> int | None:
    try:
        return None if text == NEVER else whole(1, MAX_COUNT)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or {NEVER}") from None


_CHOICES: dict[str, tuple[Callable[[str], Any], str]] = {
    "--capacity": (whole(1, MAX_COUNT), "rows"),
    "--min-count": (whole(1, MAX_COUNT), "occurrences that admit a key"),
    "--expire": (
        _after,
        f"a key expires when the clock has moved on by more than this since its last row; or {NEVER}",
    ),
    "--device-bytes": (whole(1, MOST_BYTES), "bytes of rows that a cached table has on the devices"),
    "--look-ahead": (whole(0, MAX_COUNT), "openings of the gate that a cached table looks ahead"),
}


def run(args: argparse.Namespace, out: Output) -> None:
    drops_bad_rows, _ = check_reading(args)  # reported before the configuration is read
    config = EmbeddingConfig.load(args.config)
    keywords = keywords_of(args, "check", ReadingOptions, OneReaderOptions)
    policy = policy_of(args, config)
    keywords |= {"on_bad_row": "drop" if drops_bad_rows else "error", "merge": policy.merge(args.merge)}
    options = reading(config, **keywords)
    reader = FrameReader(args.sources, options)
    started_s = time.perf_counter()
    planner = Planner(
        config,
        all_choices(
            args.capacity,
            {"min_count": args.min_count, "expire_after": args.expire},
            {"device_bytes": args.device_bytes, "look_ahead": args.look_ahead},
        ),
        policy=policy,
        seed=args.seed,
        threads=args.threads,
        sample=args.sample,
    )
    progress = ProgressLine()
    try:
        planner.run(reader, limit=args.limit, flush=args.flush, max_stale=args.max_stale, progress=progress)
    finally:
        progress.clear()
    say_plan(out, planner, time.perf_counter() - started_s, reader.first_bad)


def say_plan(out: Output, planner: Planner, seconds: float, first_bad: dict[str, str]) -> None:
    """Print what became of keys and rows under every choice."""
    counters, pending = planner.counters, planner.num_pending
    notes = list(counters.notes(first_bad))
    if planner.is_over:
        unread = "" if planner.read_all else "; the rest of the sources was not read"
        notes.append(f"every choice ends in a full table{unread}")
    out.say(f"rows      {count(counters.rows)} in {seconds:.2f} s ({count(counters.rows / seconds)} rows/s); ids only")
    out.say(f"frames    {frames_text(counters.frames, counters.steps, counters.stale, pending)}")
    out.say_all("note      ", notes)
    for headings, lines in compared(planner.forecasts):
        _say_cells(out, [headings, *lines])
    out.result(
        {
            **{name: getattr(counters, name) for name in ("rows", "frames", "stale", "stale_rows", "steps")},
            "pending": pending,
            "dropped": dict(counters.dropped),
            "seconds": seconds,
            "notes": notes,
            "choices": [_plain(forecast) for forecast in planner.forecasts],
        }
    )


def _say_cells(out: Output, lines: list[list[str]]) -> None:
    """Print cells below headings. The last cell of a line is a remark."""
    widths = [max(map(len, column)) for column in zip(*[line[:-1] for line in lines], strict=True)]
    for *cells, end in lines:
        first, *others = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        out.say("  ".join([first.strip().ljust(widths[0]), *others, end]).rstrip())


def _plain(forecast: Forecast) -> dict[str, Any]:
    """Return a choice as plain data."""
    full, by_table = forecast.full, {}
    for name, table in forecast.tables().items():
        settings = forecast.specs[name].dynamic
        assert settings is not None
        by_table[name] = {
            "capacity": table.capacity,
            "min_count": settings.min_count,
            "expire_after": settings.expire_after,
            **vars(table.report),
            "host_bytes": table.report.directory_bytes,
            "device_bytes": table.device_bytes,
            "share": table.share,
            "standard_error": dict(table.standard_error),
        }
    cached = {name: vars(table) for name, table in forecast.cached().items()}
    return {"tables": by_table, "cached": cached, "full": None if full is None else vars(full)}
