"""Does the host work while the device does? Traces a few steps for Perfetto, and computes the overlap from the trace.

Two rows of the trace matter, in addition to the device's (on a CPU: XLA's threads): COALESCE on the caller's thread,
and "penstock dispatch", which lays out a step and dispatches it to the device, on another.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from penstock.rows.bridge.dispatcher import DISPATCH

COALESCE = "penstock coalesce"
ROWS, STEPS = 200_000, 20
SHORT_ROWS, SHORT_STEPS = 20_000, 4
VOCABULARY, DIM = 100_000, 32
Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Overlap:
    """The figures of a trace. Times in seconds; both : the caller and the dispatching thread work at the same time"""

    path: Path
    variant: str
    steps: int
    rows: int
    seconds: float
    coalesce: float
    dispatch: float
    both: float

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path)}


def trace(directory: Path, rows: int, steps: int) -> Overlap:
    """Run steps of ``rows`` gradient rows under JAX's profiler, which writes below the directory."""
    from penstock.api.engine import Engine
    from penstock.model.config.embedding import EmbeddingConfig
    from penstock.model.config.tables import TableConfig
    from penstock.model.updates import Adagrad

    if jax.default_backend() == "cpu":
        # With tables in the host's memory the caller runs the step itself, and the trace has no dispatch.
        os.environ.setdefault("PENSTOCK_VARIANT", "xla")
    engine = Engine(EmbeddingConfig.from_tables([TableConfig(VOCABULARY, DIM, name="t")], Adagrad(0.1)))
    rng = np.random.default_rng(0)
    frames = [(rng.zipf(1.2, rows) % VOCABULARY, rng.standard_normal((rows, DIM), np.float32)) for _ in range(steps)]
    engine.apply({"t": frames[0]})  # compiles
    engine.lookup("t", [0])
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call would be a million events
    with jax.profiler.trace(str(directory), create_perfetto_trace=True, profiler_options=options):
        began = time.perf_counter()
        for frame in frames:
            with jax.profiler.TraceAnnotation(COALESCE):
                engine.apply({"t": frame})
        engine.lookup("t", [0])  # waits for the device
        seconds = time.perf_counter() - began
    path = max(directory.rglob("perfetto_trace.json.gz"), key=lambda file: file.stat().st_mtime_ns)
    coalesce, dispatch = spans(path, COALESCE), spans(path, DISPATCH)
    totals = map(total, (coalesce, dispatch, common(coalesce, dispatch)))
    return Overlap(path, engine.core.tables.table("t").backend.variant, steps, rows, seconds, *totals)


def spans(path: Path, name: str) -> Spans:
    """Return (start, end) of the events of that name, in seconds of the trace's clock."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    matches = [event for event in events if event.get("name") == name and event.get("ph") == "X"]
    return sorted((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in matches)


def total(intervals: Spans) -> float:
    return sum(end - start for start, end in intervals)


def common(first: Spans, second: Spans) -> Spans:
    """Return the intersections of two lists of spans; the spans within a list must be disjoint."""
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return [(start, end) for start, end in pairs if start < end]
