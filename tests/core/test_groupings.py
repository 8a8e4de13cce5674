"""Any grouping of the same frames into runs gives the same of everything that a run leaves behind, with every observer.

What is left behind: the report, the rows and slots, the gate, positions, deltas, quarantined rows, commits, what
telemetry and readers of the tables know, and if the run ends by an error, that error, at the same frame.
"""

import itertools
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import evidence
import numpy as np
import pyarrow as pa
import pytest
from batches import batch
from hypothesis import given
from hypothesis import strategies as st
from ipc import write

import penstock as ps
from penstock.checkpoint.commit_session import CommitSession
from penstock.core.observers import StepObserver, Unseen

ROWS, DIM, MOST_FRAMES = 12, 2, 10
PLAIN = {"optimizer": ps.Adagrad(0.1)}
TABLES = {
    "plain": PLAIN,
    "scheduled": {"optimizer": ps.SGD(lambda step: 0.5 / (1 + step))},
    "not lazy": {"optimizer": ps.Adam(0.1, lazy_adam=False)},
    "keyed": PLAIN | {"dynamic": ps.Dynamic()},  # its table may become full
    "cached": PLAIN | {"placement": ps.Placement("cached", device_bytes=100, look_ahead=2)},
}
CONFIGS = {
    name: ps.EmbeddingConfig.from_tables([ps.TableConfig(ROWS, DIM, name="t", **options)])
    for name, options in TABLES.items()
}


class LostError(Exception):
    """An error of an observer, after a frame has entered the gate."""


class Meddler(StepObserver):
    """Raises an error after the frame of a step. one_by_one : it has to see every step"""

    def __init__(self, core, at, one_by_one):
        self.core, self.at, self.one_by_one = core, at, one_by_one
        core.observe(self)

    def most_unseen(self):
        if self.one_by_one:
            return Unseen(0)
        return Unseen() if self.at is None else Unseen(self.at - self.core.global_step)

    def pushed(self, pushed):
        if self.core.global_step == self.at:
            raise LostError(f"at step {self.at}")


@dataclass
class Case:
    """Frames, and how they are applied. sizes : of the frames; bad_ids, bad_values : by row"""

    sizes: list
    steps: list | None
    contributors: bool
    bad_ids: dict
    bad_values: dict
    table: str
    num_required: int
    reduction: str
    source: str
    waiting: bool  # a frame is in the gate before
    probe: bool
    meddles_at: int | None
    every: int | None
    limit: int | None
    options: dict
    deltas: dict

    def log(self):
        rng, rows = np.random.default_rng(len(self.sizes)), sum(self.sizes)
        ids, values = rng.integers(0, ROWS, rows), rng.standard_normal((rows, DIM)).astype(np.float32)
        for row, bad_id in self.bad_ids.items():
            ids[row % rows] = bad_id
        for row, value in self.bad_values.items():
            values[row % rows, 0] = value
        columns = {}
        if self.steps is not None:
            columns["step"] = pa.array(np.repeat(np.array(self.steps, np.int64), self.sizes))
        if self.contributors:
            names = [f"w{number % 2}" for number in range(len(self.sizes))]
            columns["contributor"] = pa.array(np.repeat(names, self.sizes).tolist())
        return batch(ids, values, DIM, **columns)

    def engine(self, one_by_one, folder=None):
        """An engine with every observer, and perhaps a frame in its gate. folder : of the commits that it continues"""
        config = CONFIGS[self.table]
        options = {"num_required": self.num_required, "reduction": self.reduction, "threads": 1}
        engine = ps.Engine(config, **options) if folder is None else ps.Engine.restore(folder, config=config, **options)
        if self.table != "cached":
            _ = engine.reads
        if self.probe:
            engine.watch.look_closer()
        if self.waiting and folder is None:
            engine.apply({"t": (np.array([3]), np.ones((1, DIM), np.float32))})
        engine.meddler = Meddler(engine.core, self.meddles_at, one_by_one)
        return engine


def groupings(num_frames, random):
    """The numbers of frames before which batches begin: single, by two, all and random, each once.

    In ``make test`` single or by two, by turns.
    """
    single, by_two = tuple(range(num_frames)), tuple(range(0, num_frames, 2))
    regular = [single, by_two] if evidence.IS_EVIDENCE else [by_two if sum(random) % 2 else single]
    return dict.fromkeys([*regular, (0,), tuple(sorted({0, *(number % num_frames for number in random)}))])


@pytest.fixture(scope="module", autouse=True)
def begun():
    """Where commits begin, each of which is durable at once: how long one is in flight depends on the disk."""
    begin, places = CommitSession.begin, []

    def begin_at(self):
        places.append((self._core.global_step, self._core.gate.num_accumulated))
        begin(self)
        self._notified(self._saver.finish)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommitSession, "begin", begin_at)
        yield places


class Place:
    """A folder in which a case is run with one grouping, and its source."""

    def __init__(self, case, folder, firsts):
        self.case, self.folder, self.commits, self.starts = case, folder, folder / "commits", {}
        log, rows = case.log(), np.cumsum([0, *case.sizes])
        parts = [(0, len(case.sizes))]
        if case.source in ("files", "round"):
            middle = len(case.sizes) // 2
            parts = [part for part in ((0, middle), (middle, len(case.sizes))) if part[0] < part[1]]
        self.batches = []
        for number, (begin, end) in enumerate(parts):
            edges = rows[sorted({begin, end, *(first for first in firsts if begin < first < end)})]
            self.batches.append([log.slice(a, b - a) for a, b in itertools.pairwise(edges)])
            self.starts[f"{number}.arrows"] = edges
        self.options = dict(case.options)
        if case.source in ("files", "round"):
            self.sources = [write(folder / name, part) for name, part in zip(self.starts, self.batches, strict=True)]
            self.options["merge"] = "round" if case.source == "round" else None
        if self.options["on_bad_row"] == "quarantine":
            self.options["on_bad_row"] = f"quarantine={folder / 'bad.arrow'}"
        self.options |= case.deltas | {"deltas": folder / "deltas.arrow"} if case.deltas is not None else {}
        self.options |= {"checkpoint": self.commits, "every": case.every, "keep": 99} if case.every else {}

    def source(self):
        if self.case.source in ("files", "round"):
            return self.sources
        return iter(self.batches[0]) if self.case.source == "iterator" else self.batches[0]

    def placed(self, text):
        """A text with the number of a row in its log, in place of its batch and its row there."""

        def named(match):
            name = Path(match[1]).name
            name = name if name in self.starts else "0.arrows"
            return f"{name}: row {self.starts[name][int(match[2])] + int(match[3])}"

        return re.sub(r"(\S+): batch (\d+), row (\d+)", named, text)

    def run(self, engine, **options):
        """What a run returns or raises, and what it leaves in the engine."""
        try:
            report = engine.run(self.source(), **self.options | options).to_dict()
            report |= dict.fromkeys(("seconds", "rows_per_s", "held_bytes"))
            if cache := report["tables"]["t"].get("cache"):
                cache["waited_ms"] = None
            result = report | {"notes": [self.placed(note) for note in report["notes"]]}
        except (ps.PenstockError, LostError) as error:
            result = type(error), re.sub(r"[0-9.]+ s ago", "", self.placed(str(error)))
        return result, state_of(engine)

    def files(self):
        """The deltas, the bad rows with their places in the log, and the last commit."""
        found = []
        if (path := self.folder / "deltas.arrow").exists():
            found.append(pa.ipc.open_stream(path).read_all().to_pylist())
        if (path := self.folder / "bad.arrow").exists():
            for row in pa.ipc.open_file(path).read_all().to_pylist():
                at = f"{row.pop('source', '')}: batch {row.pop('batch')}, row {row.pop('row_index')}"
                found.append((self.placed(at), repr(row)))
        if any(self.commits.glob("*.commit")):
            found.append(state_of(self.case.engine(False, self.commits)))
        return found


def state_of(engine):
    """What a run leaves in an engine, in its telemetry and for readers."""
    positions, watch, core = engine.session.positions.get_state(), engine.watch, engine.core
    for source in positions["sources"]:
        source[0] = Path(source[0]).name
    state = [
        core.failure.reason,
        core.changed_step,
        core.last_rates,
        core.gate.get_state(),
        core.pipeline.get_state(),
        positions,
    ]
    state += [watch.num_steps, dict(watch.updated), len(watch.recent_s), watch.counters.get_state() | {"held_bytes": 0}]
    if watch.probe is not None:
        state.append([sample.frame for sample in watch.probe.hot.samples])
    if core.failure.reason is None:
        state.append(engine.state_hash())
        if engine.core.tables.table("t").on_host is not None:
            rows = engine.reads.lookup({"t": np.arange(ROWS)})
            state.append((rows["t"].tobytes(), rows.version))
    return state


def outcome(case, firsts, one_by_one, begun):
    begun.clear()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(case, Path(folder), firsts)
        left = [place.run(case.engine(one_by_one), limit=case.limit)]
        if case.every and case.limit is not None and case.source != "iterator":
            left.append(place.files())
            if any(place.commits.glob("*.commit")):
                left.append(place.run(case.engine(one_by_one, place.commits), resume=True))
        return left, place.files(), list(begun)


@st.composite
def cases(draw):
    num_frames = draw(st.integers(4, MOST_FRAMES))
    lists = st.lists(st.integers(1, 4), min_size=num_frames, max_size=num_frames)
    options = {
        "flush": draw(st.booleans()),
        "on_bad_row": draw(st.sampled_from(["error", "error", "drop", "quarantine"])),
    }
    sizes, steps = draw(lists), None
    if draw(st.sampled_from([True, True, False])):
        behind = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=num_frames, max_size=num_frames))
        steps = [number - back for number, back in enumerate(behind)]  # neighbours of one step are one frame
    else:
        sizes = sizes[:1] * num_frames
        options["contribution_rows"] = sizes[0]
    rows, rare, few = st.integers(0, 3 * num_frames), st.sampled_from([False] * 7 + [True]), st.integers(0, num_frames)
    bad = draw(st.sampled_from([0, 0, 1, 2]))
    return Case(
        sizes,
        steps,
        contributors=draw(rare),
        bad_ids=draw(st.dictionaries(rows, st.sampled_from([-1, ROWS, 1 << 50]), max_size=min(bad, 1))),
        bad_values=draw(st.dictionaries(rows, st.sampled_from([np.nan, np.inf, 3e38, -3e38]), max_size=bad)),
        table=draw(st.sampled_from(["plain"] * 16 + [*TABLES])),
        num_required=draw(st.integers(1, 3)),
        reduction=draw(st.sampled_from(["mean", "sum"])),
        source=draw(st.sampled_from(["iterator", "list", "iterator", "files", "list", "round"])),
        waiting=draw(st.booleans()),
        probe=draw(rare),
        meddles_at=draw(st.none() | st.none() | few),
        every=draw(st.sampled_from([None, 2, 3, 4])),
        limit=draw(st.none() | st.none() | few),
        options=options,
        deltas=draw(st.sampled_from([None, {"per_steps": 2}, {"per_steps": 3}, {"per_rows": 4}, {}])),
    )


@given(cases(), st.lists(st.integers(0, MOST_FRAMES), max_size=4))
@evidence.examples(5000 if evidence.IS_LONG else 500, 200)
def test_any_grouping_of_frames_gives_the_same_with_every_observer(begun, case, random):
    wanted = outcome(case, range(len(case.sizes)), True, begun)
    for firsts in groupings(len(case.sizes), random):
        assert outcome(case, firsts, False, begun) == wanted
