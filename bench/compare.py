"""The measurement of one point: create the sides, check them against the reference, and time them in turns.

If the tables of all peers do not fit into memory together, the peers run against penstock in several waves. A ratio
always compares two sides of one wave.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench import machine, roofline
from penstock.bench.cases import COMPARED, LATENCY_STEPS, Point
from penstock.bench.changed_rows import rollback_sides
from penstock.bench.check import wrong
from penstock.bench.contestants import (
    AS_ADAGRAD,
    DISCARDED,
    OURS,
    REPLAY,
    STATIC,
    UPDATES,
    AnyWay,
    KeyWay,
    PerTable,
    Runner,
    Side,
    Way,
)
from penstock.bench.doput import Discarded, DoPut
from penstock.bench.dynamic_tables import STEPS_PER_ROUND, ByKey, key_sides
from penstock.bench.interleave import Timing, take_turns
from penstock.bench.penstock_adapter import Coalesce, Latency, Replay, Update
from penstock.bench.reads import SECONDS, SHORT_SECONDS, measured
from penstock.bench.small_frames import FRAMES, SHORT_FRAMES, frames_sides, startup_sides
from penstock.bench.workloads import Step

SHARE_OF_FREE_MEMORY = 0.8  # that the peers of a wave may take together

Say = Callable[..., None]


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement. ways : of the peers, all kinds; short : fewer frames and shorter times of reads

    say : called with each attempt before it begins, so that the parent can name the one that killed the process
    """

    threads: int
    rounds: int
    ways: Sequence[AnyWay]
    say: Say
    short: bool = False


def measure(point: Point, steps: Sequence[Step], rates: roofline.Rates | None, settings: Settings) -> dict[str, Any]:
    """Return the result of one point, as JSON data."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        if point.kind == "latency":
            result = latency(point, steps, settings)
        elif point.kind in ("frames", "startup", "rollback"):
            result = in_turns(point, steps, settings, Path(folder))
        elif point.kind == "reads":
            result = reads(settings, Path(folder))
        elif point.case.startswith("keys/"):
            result = keys(point, steps, settings)
        else:
            result = against_peers(point, steps, settings, Path(folder))
    result |= {"case": point.case, "kind": point.kind, "x": point.x, "threads": settings.threads}
    result["workload"] = described(point, steps)
    if rates is not None:
        result["limit_ms"] = round(roofline.limit_ms(point.kind, steps[0], rates), 4)
        result["memory"] = rates.as_json()
    return result


def against_peers(point: Point, steps: Sequence[Step], settings: Settings, folder: Path) -> dict[str, Any]:
    """Measure penstock and every peer that supports this kind."""
    failed: dict[str, str] = {}
    with tried(OURS, settings.say, failed):
        ours = our_side(point, steps, settings.threads, folder)
        check(ours, point.kind, steps)
    if failed:
        return {"sides": {}, "failed": failed}
    # Growth cases measure penstock only.
    ways = [w for w in settings.ways if isinstance(w, Way) and w.kind == point.kind and point.case in COMPARED]
    timings: list[tuple[int, str, Timing]] = []
    for number, wave in enumerate(waves(ways, steps)):
        sides: dict[str, Runner] = {OURS: ours}
        for name, create in checked_baselines(point, steps, settings.threads, folder).items():
            with tried(name, settings.say, failed):
                side = create()
                check(side, point.kind, steps)
                sides[name] = side
        if point.kind == "doput":
            with tried(DISCARDED, settings.say, failed):
                sides[DISCARDED] = Discarded(steps, folder)
        for way in wave:
            with tried(way.name, settings.say, failed):
                sides[way.name] = checked(way, point, steps)
        settings.say("begin", side=OURS)
        turns = take_turns(sides, len(steps), settings.rounds)
        timings += [(number, name, timing) for name, timing in turns.items()]
        sides.clear()
        gc.collect()
    return {"sides": sides_of(timings, {way.name for way in ways if way.ids_kept}), "failed": failed}


def our_side(point: Point, steps: Sequence[Step], threads: int, folder: Path) -> Side:
    if point.kind == "coalesce":
        return Coalesce(point.workload, steps, threads)
    if point.kind == "replay":
        return Replay(point.workload, steps, threads, folder)
    if point.kind == "doput":
        return DoPut(point.workload, steps, threads, folder)
    if point.kind == "dynamic":
        return ByKey(point.workload, steps, threads)
    return Update(point.workload, point.kind, steps, threads)


def checked_baselines(point: Point, steps: Sequence[Step], threads: int, folder: Path) -> dict[str, Callable[[], Side]]:
    """Return penstock's baselines of the case by name, as functions that create them."""
    if point.kind == "doput":
        return {REPLAY: lambda: Replay(point.workload, steps, threads, folder)}
    if point.kind == "dynamic":
        return {STATIC: lambda: Update(point.workload, "adagrad", steps, threads)}
    return {}


def checked(way: Way, point: Point, steps: Sequence[Step]) -> Side:
    """Return the way as a side whose first step was checked. Raises WrongError."""
    side = PerTable(way, point.workload, steps)
    if way.ids_kept is None:
        check(side, point.kind, steps, way.corrects_bias)
        return side
    side.run([0])
    lost = side.ids_lost()
    if lost:
        raise WrongError(f"{lost} of {point.workload.rows} ids are not in its result")
    return side


class WrongError(Exception):
    """The first step of a side differs from the reference."""


def check(side: Side, kind: str, steps: Sequence[Step], corrects_bias: bool = False) -> None:
    """Run the side's first step and compare it with the reference. Raises WrongError."""
    side.prepare([0])
    side.run([0])
    problem = wrong(side, kind, steps[0], corrects_bias)
    if problem is not None:
        raise WrongError(problem)


@contextmanager
def tried(name: str, say: Say, failed: dict[str, str]) -> Iterator[None]:
    """Record an error in the context as the failure of that side, and continue with the others."""
    say("begin", side=name)
    try:
        yield
    except WrongError as error:
        failed[name] = f"wrong result: {error}"
    except Exception as error:  # a library may raise anything
        first = (str(error).strip() or "no message").splitlines()[0]
        failed[name] = f"{type(error).__name__}: {first}"[:400]


def waves(ways: Sequence[Way], steps: Sequence[Step]) -> list[list[Way]]:
    """Return the ways in groups that fit into the free memory together; one empty group if there are no ways."""
    room = machine.free_bytes() * SHARE_OF_FREE_MEMORY
    groups: list[list[Way]] = [[]]
    taken = 0.0
    for way in ways:
        size = way.num_bytes(steps[0].workload)
        if groups[-1] and taken + size > room:
            groups.append([])
            taken = 0.0
        groups[-1].append(way)
        taken += size
    return groups


def sides_of(timings: Sequence[tuple[int, str, Timing]], ids_only: Collection[str] = ()) -> dict[str, Any]:
    """Return the results by side: penstock over all waves, every peer with penstock's median in its wave; none if
    penstock failed.

    ids_only : sides without a ratio
    """
    ours = {wave: timing for wave, name, timing in timings if name == OURS}
    if not ours:
        return {}
    sides = {OURS: Timing(tuple(s for timing in ours.values() for s in timing.samples)).as_json()}
    for wave, name, timing in timings:
        if name != OURS:
            sides[name] = timing.as_json() | {"wave": wave, "penstock_median_ms": ours[wave].median_ms}
            if name in ids_only:
                sides[name]["ids_only"] = True
            else:
                sides[name]["ratio"] = timing.median_ms / ours[wave].median_ms
    return sides


def latency(point: Point, steps: Sequence[Step], settings: Settings) -> dict[str, Any]:
    """Measure a small step through ``run`` and ``apply``, and the smallest possible JAX call for comparison."""
    failed: dict[str, str] = {}
    sides: dict[str, Runner] = {}
    for name, how in ((OURS, "run"), ("penstock_apply", "apply"), ("bare_donated_jit", "bare")):
        with tried(name, settings.say, failed):
            side = Latency(point.workload, steps, settings.threads, how)
            if how != "bare":
                check(side, "adagrad", steps)
            sides[name] = side
    turns: Mapping[str, Timing] = take_turns(sides, LATENCY_STEPS, settings.rounds) if OURS in sides else {}
    return {"sides": sides_of([(0, name, timing) for name, timing in turns.items()]), "failed": failed}


def in_turns(point: Point, steps: Sequence[Step], settings: Settings, folder: Path) -> dict[str, Any]:
    """Measure a file of small frames next to a bare consumer, the start of a replay next to the import of jax, or a
    rollback next to a commit."""
    failed: dict[str, str] = {}
    sides: dict[str, Runner] = {}
    frames = SHORT_FRAMES if settings.short else FRAMES
    with tried(OURS, settings.say, failed):
        if point.kind == "startup":
            sides, frames = startup_sides(steps[0], folder), 1
        elif point.kind == "rollback":
            sides, frames = rollback_sides(steps[0], settings.threads, folder), 1
        else:
            sides = frames_sides(steps, settings.threads, folder, frames)
    turns = take_turns(sides, frames, settings.rounds) if sides else {}
    return {"sides": sides_of([(0, name, timing) for name, timing in turns.items()]), "failed": failed}


def reads(settings: Settings, folder: Path) -> dict[str, Any]:
    """Measure reads, one way after the other: each has its percentiles."""
    failed: dict[str, str] = {}
    sides: dict[str, Any] = {}
    with tried(OURS, settings.say, failed):
        seconds, scale = (SHORT_SECONDS, 1 / 16) if settings.short else (SECONDS, 1.0)
        for name, latencies in measured(folder, seconds, scale):
            sides[name] = latencies.as_json()
            if name != OURS:
                sides[name]["ratio"] = sides[name]["median_ms"] / sides[OURS]["median_ms"]
    return {"sides": sides, "failed": failed}


def keys(point: Point, steps: Sequence[Step], settings: Settings) -> dict[str, Any]:
    """Measure a case of keys: penstock, its baselines, and every peer that numbers keys."""
    failed: dict[str, str] = {}
    sides: dict[str, Runner] = {}
    ways = [way for way in settings.ways if isinstance(way, KeyWay)]
    rounds = settings.rounds * (STEPS_PER_ROUND if point.kind == "evict" else 1)
    for name, create in key_sides(point.kind, point.workload, steps, settings.threads, ways, rounds).items():
        with tried(name, settings.say, failed):
            side = create()
            if wrong_keys := getattr(side, "num_wrong", 0):
                raise WrongError(f"{wrong_keys} keys have a wrong number or row")
            sides[name] = side
    settings.say("begin", side=OURS)
    turns = take_turns(sides, len(steps), rounds) if OURS in sides else {}
    return {"sides": sides_of([(0, name, timing) for name, timing in turns.items()]), "failed": failed}


def described(point: Point, steps: Sequence[Step]) -> dict[str, Any]:
    """Return the numbers of the workload, as drawn."""
    workload = point.workload
    unique = sum(steps[0].num_unique.values())
    return {
        "name": workload.name,
        "title": workload.title,
        "tables": len(workload.tables),
        "dims": sorted({t.dim for t in workload.tables}),
        "vocabulary": sum(t.vocabulary_size for t in workload.tables),
        "rows": workload.rows,
        "unique": unique,
        "reuse": round(workload.rows / unique, 3),
        "distinct_steps": workload.num_steps,
        "batch_rows": workload.batch_rows,
        "step_mb": round(workload.step_bytes / 1e6, 1),
        "tables_mb": round(workload.table_bytes / 1e6, 1),
    }


def kinds_with_limits(points: Sequence[Point]) -> list[str]:
    kinds = {"adagrad" if p.kind in AS_ADAGRAD else p.kind for p in points}
    return sorted(kinds & {"coalesce", *UPDATES})
