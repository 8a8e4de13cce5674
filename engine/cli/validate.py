"""``penstock validate``: lint a configuration and read sources to their end against it, without applying anything."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

from penstock.base.errors import ConfigError, InputError, PenstockError
from penstock.base.filesystem.file_stores import place_of
from penstock.base.threads import ThreadTeam
from penstock.base.validation import INT64_MAX
from penstock.cli.command_line import (
    Parser,
    add_flags,
    add_sources,
    check_reading,
    keywords_of,
    policy_of,
)
from penstock.cli.key_checks import KeyChecks
from penstock.cli.output import Output, count, frames_text, several, size_text
from penstock.core.pipeline import Pipeline, TableStore
from penstock.core.trial_gate import TrialGate
from penstock.io.decoding.reader import FrameReader, Frames, ReadOptions, in_order, sorted_by_step
from penstock.io.partitions.partition_source import TopicKind
from penstock.io.sources.opening import Source, expanded, open_sources
from penstock.io.sources.source_kinds import source_kind
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import FromFile
from penstock.model.gate_policy import GatePolicy
from penstock.model.learning_rates import LearningRates
from penstock.model.options import OneReaderOptions, ReadingOptions
from penstock.model.stats import FROZEN, NORM_LIMIT, Counters, too_stale
from penstock.model.workers import frame_in_rounds
from penstock.pyx.keys.directory import directory_bytes
from penstock.rows.initial_vectors import open_vectors

EXAMPLE = "penstock validate tables.pbtxt worker0.arrows worker1.arrows --merge step --num-required 2"


def add(command: Parser) -> None:
    add_sources(command, "*")
    add_flags(command, "check")


VERDICTS = {
    0: "valid",
    3: "not valid: the sources have errors, listed above",
    4: "not valid: the configuration has errors, listed above",
}


def run(args: argparse.Namespace, out: Output) -> int:
    code = check_all(args, out)
    out.say(f"{'verdict':8}  {VERDICTS[code]}")
    return code


def check_all(args: argparse.Namespace, out: Output) -> int:
    """Check the configuration and every source, report the findings, and return the exit code."""
    drops_bad_rows, _ = check_reading(args)  # reported before the configuration is read
    config, findings = EmbeddingConfig.check(args.config)
    if config is not None:
        rates_text = several(config.num_tags, "dynamic learning rate")
        out.say(f"{args.config}: {several(len(config.table_names), 'table')}, {rates_text}")
    for finding in findings:
        place = finding.where if finding.line is None else f"line {finding.line}, {finding.where}"
        out.say(f"{finding.severity:8}  {finding.code}  {place}: {finding}")
    if not findings:
        out.say("good      nothing to remark on the configuration")
    memory: dict[str, Any] = {}
    of_vectors: list[str] = []
    if config is not None and not any(finding.severity == "error" for finding in findings):
        memory = say_memory(config.at_step(INT64_MAX), out)
        of_vectors = vector_problems(config)
        out.say_all("error     ", of_vectors)
    checks: list[SourceCheck] = []
    walked: dict[str, Any] = {}
    if config is None and args.sources:
        out.say(f"{'error':8}  the sources were not read: without a usable configuration there is nothing to check by")
    elif config is not None:
        keywords = keywords_of(args, "check", ReadingOptions, OneReaderOptions) | {"on_bad_row": "drop", "merge": None}
        missing = LearningRates(config.num_tags, args.learning_rates, config.schedules).missing
        options = ReadOptions.of_config(config, keywords, rates_needed=missing)
        checks = [SourceCheck(source, drops_bad_rows) for text in args.sources for source in _sources(text, args)]
        if checks:
            keys = KeyChecks(config if memory else None)
            walked = walk(
                checks, options, config, policy_of(args, config), stores_of(config) if memory else {}, args, keys, out
            )
            walked |= keys.say(out)
    stale_errors = walked.pop("stale_errors", [])
    of_config = [str(finding) for finding in findings if finding.severity == "error"]
    of_keys = [
        f"table '{finding['table']}': {finding['problem']}"
        for finding in walked.get("key_findings", [])
        if finding["severity"] == "error"
    ]
    of_sources = [error for check in checks for error in check.errors]
    errors = [*of_config, *of_vectors, *of_sources, *of_keys, *stale_errors]
    out.result(
        {
            "config": args.config,
            "valid": not errors,
            "errors": errors,
            "findings": [vars(finding) for finding in findings],
            "memory": memory,
            "sources": [check.to_dict() for check in checks],
            **walked,
        }
    )
    if any(check.is_bad for check in checks) or stale_errors or of_vectors:
        return 3
    return 4 if errors else 0


def say_memory(config: EmbeddingConfig, out: Output) -> dict[str, Any]:
    """Print the memory that the tables need at least. Return the bytes of weights and slots by table, and those of the
    directories of dynamic tables and of cached rows on the devices."""
    memory = {spec.name: {"weights": spec.weights_bytes, "slots": spec.slots_bytes} for spec in config.tables}
    for places, text in ((("device",), "over all devices"), (("host", "cached"), "on the host")):
        sizes = {spec.name: memory[spec.name] for spec in config.tables if spec.placement.where in places}
        if not sizes:
            continue
        weights, slots = (sum(size[kind] for size in sizes.values()) for kind in ("weights", "slots"))
        text = f"at least {size_text(weights + slots)} {text}: weights {size_text(weights)}, slots {size_text(slots)}"
        if len(sizes) > 1:
            most = max(sizes, key=lambda name: sum(sizes[name].values()))
            text += f"; most for '{most}', {size_text(sum(sizes[most].values()))}"
        out.say(f"{'memory':8}  {text}")
    cached = {spec.name: spec.places * spec.row_bytes for spec in config.tables if spec.placement.where == "cached"}
    for name, num_bytes in cached.items():
        memory[name]["cached"] = num_bytes
    if cached:
        text = f"at least {size_text(sum(cached.values()))} over all devices: rows of"
        out.say(f"{'memory':8}  {text} {several(len(cached), 'cached table')}")
    dynamic = {spec.name: spec.dynamic.evict == "lfu" for spec in config.tables if spec.dynamic is not None}
    for name, counts in dynamic.items():
        memory[name]["directory"] = directory_bytes(config.sizes[name][0], counts)
    if dynamic:
        total = sum(memory[name]["directory"] for name in dynamic)
        tables = several(len(dynamic), "dynamic table")
        out.say(f"{'memory':8}  at least {size_text(total)} on the host: directories of {tables}")
    return memory


def vector_problems(config: EmbeddingConfig) -> list[str]:
    """Return what is wrong with the files that tables start from."""
    problems = []
    for spec in config.tables:
        if isinstance(spec.initializer, FromFile):
            try:
                open_vectors(spec)
            except PenstockError as error:
                problems.append(str(error))
    return problems


class SourceCheck:
    """The check of one source: its counts and its errors.

    drops_bad_rows : bad rows are not errors, because a replay would drop them
    is_bad : the source itself is invalid; other errors are the configuration's
    errors, dropped : as text; complete after ``end``
    """

    def __init__(self, source: str | Source, drops_bad_rows: bool) -> None:
        self._opens, self.source = source, place_of(source) if isinstance(source, str) else source.name
        self._drops_bad_rows = drops_bad_rows
        self.counters = Counters()
        self.errors: list[str] = []
        self.dropped: list[str] = []
        self.is_bad = self._opened = False
        self._reader: FrameReader | None = None

    def frames(self, options: ReadOptions, is_sorted: bool) -> Frames:
        """Yield the source's frames up to its end or first error. is_sorted : whether it must be sorted by step"""
        self._opened = True
        try:
            self._reader = FrameReader(self._opens, options)
            yield from sorted_by_step(iter(self._reader)) if is_sorted else self._reader
        except (ConfigError, InputError) as error:
            self.errors.append(str(error))
            self.is_bad |= isinstance(error, InputError)

    def end(self) -> None:
        """Complete ``errors`` and ``dropped`` after the last frame."""
        first_bad = {} if self._reader is None else self._reader.first_bad
        for reason, first in first_bad.items():  # includes the frame in which reading stopped
            number = self.counters.dropped[reason]
            text = f"{count(number)} bad rows; first: {first}" if number else first
            (self.dropped if self._drops_bad_rows else self.errors).append(text)
            self.is_bad |= not self._drops_bad_rows
        self.dropped += [
            f"{count(number)} gradients of table '{reason.removeprefix(FROZEN)}', which is frozen"
            for reason, number in self.counters.dropped.items()
            if reason.startswith(FROZEN)
        ]
        if number := self.counters.dropped[NORM_LIMIT]:
            self.dropped.append(f"{count(number)} rows of frames beyond the limit of their contributor")

    def say(self, out: Output) -> None:
        counters = self.counters
        if not self._opened:
            out.say(f"{'unread':8}  {self.source}: --limit ends before it")
            return
        state = "bad" if self.errors else "good"
        stale = f", {count(counters.stale)} stale" if counters.stale else ""
        out.say(f"{state:8}  {self.source}: {count(counters.rows)} rows in {count(counters.frames)} frames read{stale}")
        if counters.truncated:
            out.say(f"{'truncated':8}  {count(counters.truncated)} ids beyond the length of their sequence")
        out.say_all("note      ", () if self._reader is None else self._reader.notes())
        out.say_all("dropped   ", self.dropped)
        out.say_all("error     ", self.errors)

    def to_dict(self) -> dict[str, Any]:
        counters = self.counters
        numbers = {name: getattr(counters, name) for name in ("rows", "frames", "stale", "stale_rows", "truncated")}
        of_frozen = {reason: n for reason, n in counters.dropped.items() if reason.startswith(FROZEN)}
        bad_rows = {reason: n for reason, n in counters.dropped.items() if reason not in of_frozen}
        return {"source": self.source, **numbers, "bad_rows": bad_rows, "errors": self.errors} | (
            {"dropped": of_frozen} if of_frozen else {}
        )


def _sources(text: str, args: argparse.Namespace) -> Sequence[str | Source]:
    """Return the partitions of a topic; any other source stays a text, whose errors are findings."""
    if isinstance(source_kind(text), TopicKind):
        return open_sources(text, patience_s=args.patience)
    return expanded(text)


def stores_of(config: EmbeddingConfig) -> dict[str, TableStore]:
    """Return what sums the rows between two openings, as a replay does: a sum may leave the finite range."""
    counts = {"mean": False, "count_frames": True, "count_rows": True}
    return {spec.name: TableStore(None, spec.dim, accumulate=spec.accumulate, **counts) for spec in config.tables}


def walk(
    checks: list[SourceCheck],
    options: ReadOptions,
    config: EmbeddingConfig,
    policy: GatePolicy,
    stores: Mapping[str, TableStore],
    args: argparse.Namespace,
    keys: KeyChecks,
    out: Output,
) -> dict[str, Any]:
    """Pass the frames of all sources through a gate without tables. Print and return the resulting counts.

    stores : of the rows that the gate admits, by table; empty: the configuration has errors
    keys : gets the openings of the gate
    """
    pipeline, total = Pipeline(stores, ThreadTeam(1)) if stores else None, Counters()

    def on_open() -> None:
        if pipeline is not None:
            keys.open(gate.global_step, pipeline)
        total.steps += 1

    specs = config.tables if pipeline is not None else ()
    limit = config.limit if pipeline is not None else None
    trial, names = TrialGate(policy, pipeline, on_open, specs, limit), policy.names_of_sources(len(checks))
    gate = trial.gate
    frames = [check.frames(options, args.merge == "step") for check in checks]
    with closing(in_order(frames, policy.merge(args.merge))) as numbered:
        for number, frame in islice(numbered, args.limit):
            if policy.workers is not None:
                frame = frame_in_rounds(frame, number, names)
            if frame.is_void:
                checks[number].counters.dropped.update(frame.dropped)
                continue
            try:
                frame, admitted = trial.admit(frame)
                trial.open()
            except InputError as error:  # of rounds, or of a table that refuses gradients: nothing can follow it
                checks[number].errors.append(str(error))
                checks[number].is_bad = True
                break
            total.count(frame, admitted)
            checks[number].counters.count(frame, admitted)
    if args.flush and not any(check.is_bad for check in checks):
        trial.open(early=True)
    for check in checks:
        check.end()
        check.say(out)
    pending = trial.num_pending
    out.say(f"{'frames':8}  {frames_text(total.frames, total.steps, total.stale, pending)}")
    if total.stale:
        out.say(f"{'stale':8}  {total.stale_note('would be')}")
    problem = too_stale(total.stale_rows, total.rows, args.max_stale)
    if problem is not None:
        out.say(f"{'error':8}  {problem}")
    named = {name: getattr(total, name) for name in ("rows", "frames", "stale", "stale_rows", "steps")}
    return {**named, "pending": pending, "stale_errors": [] if problem is None else [problem]}
