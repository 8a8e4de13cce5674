"""Random configurations and example streams for Hypothesis, in the forms that the engine and the oracle take."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import lookup_oracle
import numpy as np
import oracle
import pyarrow as pa
from hypothesis import strategies as st

import penstock as ps

RATES = [0.5, 0.1, 1.0, 0.0, -0.25]
VALUES = [1.0, -1.0, 0.1, -0.7, 3.3, 0.0, -0.0, 1e-42, 1e-20, 1e20, 12345.678]
WEIGHTS = [1.0, 0.5, 0.3, 2.0, 0.0, -0.0, -0.5, -1.0, 1e-20, 1e-40]
NOT_FINITE = [float("nan"), float("-inf"), 1e300, 3e38]  # the last where a weight or another row makes it so

# name: (penstock's class, the oracle's function, names of its slots)
OPTIMIZERS = {
    "sgd": (ps.SGD, oracle.sgd, []),
    "adagrad": (ps.Adagrad, oracle.adagrad, ["accumulators"]),
    "momentum": (ps.Momentum, oracle.momentum, ["momenta"]),
}


def schedule_of(tag):
    """The learning rate of a dynamic tag by step."""
    return lambda step: RATES[(step + tag) % len(RATES)]


class DrawnTable(NamedTuple):
    """A table of a drawn configuration."""

    name: str
    rows: int
    dim: int
    combiner: str
    optimizer: str
    rate: float | None  # None: dynamic
    tag: int | None

    def start(self):
        """Weights and slots: any numbers, the same for the engine and the oracle."""
        shape = (self.rows, self.dim)
        weights = (np.arange(self.rows * self.dim, dtype=np.float32).reshape(shape) * np.float32(0.37)) % 1 - 0.5
        slots = {name: np.full(shape, 0.1, np.float32) for name in OPTIMIZERS[self.optimizer][2]}
        return weights.astype(np.float32), slots


@dataclass
class Drawn:
    """A configuration. ``schedules``: dynamic rates are callables of the step, else they come with each frame."""

    tables: list
    features: list
    num_required: int
    reduction: str
    schedules: bool
    nested: bool = False
    pipelined: bool = False

    @property
    def tags(self):
        return [table.tag for table in self.tables if table.tag is not None]

    @property
    def num_tags(self):
        return max(self.tags, default=-1) + 1

    def table(self, name):
        return next(table for table in self.tables if table.name == name)

    def config(self, batch_size=1):
        tables = {}
        for table in self.tables:
            rate = table.rate
            if rate is None:
                rate = schedule_of(table.tag) if self.schedules else ps.DynamicLearningRate(table.tag)
            optimizer = OPTIMIZERS[table.optimizer][0](learning_rate=rate)
            tables[table.name] = ps.TableConfig(
                table.rows, table.dim, optimizer=optimizer, combiner=table.combiner, name=table.name
            )
        features = [
            ps.FeatureConfig(tables[feature.table], name=feature.name, max_sequence_length=feature.length)
            for feature in self.features
        ]
        structure = {feature.name: leaf for feature, leaf in zip(self.features, features, strict=True)}
        return ps.EmbeddingConfig.from_features(
            structure if self.nested else features,
            batch_size,
            pipeline_execution_with_tensor_core=self.pipelined,
        )

    def engine(self, batch_size=1, **options):
        engine = ps.Engine(self.config(batch_size), num_required=self.num_required, reduction=self.reduction, **options)
        for table in self.tables:
            weights, slots = table.start()
            engine.load_parameters(table.name, weights, **slots)
        return engine

    def oracle(self):
        tables = {}
        for table in self.tables:
            weights, slots = table.start()
            update = OPTIMIZERS[table.optimizer][1]
            tables[table.name] = oracle.Table(weights, list(slots.values()), update, table.rate, table.tag)
        schedules = {tag: schedule_of(tag) for tag in self.tags} if self.schedules else {}
        return oracle.Engine(tables, self.features, self.num_required, self.reduction, schedules)


def assert_same_state(engine, wanted):
    """Bit for bit: every row, every slot, the step, what the gate holds."""
    assert engine.global_step == wanted.global_step
    assert engine.gate.num_accumulated == len(wanted.accumulated)
    for name, table in wanted.tables.items():
        got = list(engine.retrieve_parameters(name).values())
        for ours, theirs in zip(got, [table.weights, *table.slots], strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=f"table {name}")
            finite = np.isfinite(theirs)
            assert ours[finite].tobytes() == theirs[finite].tobytes(), f"table {name}: the sign of a zero"


@st.composite
def configurations(draw):
    """Tables, features and gates."""
    tables, tags = [], 0
    for n in range(draw(st.integers(1, 3))):
        rate = draw(st.sampled_from([*RATES[:2], None, None]))
        tag = None
        if rate is None:
            tag = draw(st.sampled_from([tags, *range(tags)]))
            tags = max(tags, tag + 1)
        rows, dim = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 8, 17]))
        combiner = draw(st.sampled_from(["sum", "mean", "sqrtn"]))
        tables.append(DrawnTable(f"t{n}", rows, dim, combiner, draw(st.sampled_from(list(OPTIMIZERS))), rate, tag))
    features = []
    for n in range(draw(st.integers(len(tables), len(tables) + 2))):
        table = tables[n] if n < len(tables) else draw(st.sampled_from(tables))
        features.append(lookup_oracle.Feature(f"f{n}", table.name, table.combiner, draw(st.sampled_from([0, 0, 1, 3]))))
    schedules = tags > 0 and _distinct(tables) and draw(st.booleans())
    return Drawn(tables, features, draw(st.integers(1, 3)), draw(st.sampled_from(["mean", "sum"])), schedules)


def _distinct(tables):
    """Whether every table with a dynamic rate has a separate tag: equal tags need the same callable."""
    tags = [table.tag for table in tables if table.tag is not None]
    return tags == list(range(len(tags)))


# ---- example streams


@dataclass
class Stream:
    """Parts are applied by one call each. ``bad``: rows may be bad. ``call_rates``: by tag."""

    parts: list  # of lists of batches, each a list of oracle.Example
    kinds: dict  # feature → its column's Arrow type
    has_steps: bool
    has_rates: bool
    contribution_rows: int | None
    contributor: pa.DataType | None
    call_rates: dict
    cut: list  # of one list of frames per part

    @property
    def options(self):
        rows = self.contribution_rows or (None if self.has_steps else "batch")  # in IPC files, too
        return {"contribution_rows": rows, "learning_rates": self.call_rates or None}

    def arrow(self, batches):
        """Arrow batches of lists of examples: slices of one batch, so that they have offsets."""
        rows = [example for batch in batches for example in batch]
        columns = {name: pa.array([self.struct(name, row) for row in rows], kind) for name, kind in self.kinds.items()}
        columns["label"] = pa.array([0] * len(rows))
        if self.has_steps:
            columns["step"] = pa.array([row.step for row in rows], pa.int64())
        if self.contributor is not None:
            columns["contributor"] = pa.array([row.contributor for row in rows], self.contributor)
        if self.has_rates:
            columns["learning_rates"] = pa.array([row.rates for row in rows], pa.list_(pa.float32()))
        whole = pa.record_batch(columns)
        start = 0
        for batch in batches:
            yield whole.slice(start, len(batch))
            start += len(batch)

    def struct(self, name, example):
        looked = example.features.get(name)
        if looked is None:
            return None
        fields = [field.name for field in self.kinds[name]]
        return {field: value for field, value in looked._asdict().items() if field in fields}


@st.composite
def examples(draw, configuration, names, weighted, bad, beyond):
    """The features of one example. ``beyond``: an id that is out of any table's range."""
    features = {}
    for feature in configuration.features:
        if feature.name not in names or draw(st.integers(0, 7)) == 7:
            continue
        table = configuration.table(feature.table)
        good = st.integers(0, table.rows - 1)
        wrong = st.sampled_from([None, None, table.rows, 2**40, beyond])
        ids = draw(st.lists(st.one_of(good, good, good, wrong) if bad else good, max_size=4))
        weights = None
        if feature.name in weighted:
            pool = [*WEIGHTS, *WEIGHTS, None, float("inf"), 1e38] if bad else WEIGHTS
            weights = draw(st.lists(st.sampled_from(pool), min_size=len(ids), max_size=len(ids)))
        width = table.dim * max(feature.length, 1)
        pool = [*VALUES, *VALUES, *VALUES, *NOT_FINITE] if bad else VALUES
        gradient = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=5))
        gradient = (gradient * width)[:width]
        if (bad or not ids) and draw(st.integers(0, 5)) == 5:
            gradient = None
        if not ids and draw(st.booleans()):
            ids = weights = None
        features[feature.name] = lookup_oracle.Looked(ids, weights, gradient)
    return features


@st.composite
def streams(draw, configuration, bad):
    """A log of examples, and what its rows hold."""
    names = draw(st.sets(st.sampled_from([feature.name for feature in configuration.features]), min_size=1))
    weighted = {feature.name for feature in configuration.features if not feature.length and draw(st.booleans())}
    ids, beyond = draw(st.sampled_from([(pa.int64(), -1), (pa.uint64(), 2**63 + 5)]))
    kind = draw(st.sampled_from(["step", "step", "batch", "count"]))
    contributor = draw(st.sampled_from([None, pa.int64(), pa.string(), pa.dictionary(pa.int32(), pa.string())]))
    if kind != "step":
        contributor = None
    contribution_rows = draw(st.integers(1, 3)) if kind == "count" else None
    rates = draw(st.sampled_from(["column", "given", "both"])) if configuration.tags else None
    if configuration.schedules and draw(st.booleans()):
        rates = None
    tags = range(configuration.num_tags)
    call_rates = {tag: draw(st.sampled_from(RATES)) for tag in tags} if rates in ("given", "both") else {}
    parts = []
    step = 0
    for _ in range(draw(st.integers(1, 2))):
        rows = []
        for _ in range(draw(st.integers(0, 5))):
            step += draw(st.sampled_from([0, 1, 1, 1, -1]))
            who = draw(st.integers(0, 1)) if contributor is not None else None
            who = who if contributor in (None, pa.int64()) else f"worker {who}"
            for _ in range(draw(st.integers(1, 3))):
                features = draw(examples(configuration, names, weighted, bad, beyond))
                rows.append(oracle.Example(features, step if kind == "step" else None, who))
        ends = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=3)))
        ends = [0, *ends, len(rows)]
        parts.append([rows[start:end] for start, end in pairwise(ends)])
    cuts = []
    for batches in parts:
        frames = oracle.split_frames(batches, contribution_rows)
        if rates in ("column", "both"):
            for frame in frames:
                of_frame = [draw(st.sampled_from(RATES)) for _ in tags]
                frame[:] = [(n, example._replace(rates=of_frame)) for n, example in frame]
            by_row = {n: example for frame in frames for n, example in frame}
            n = 0
            for batch in batches:
                for place in range(len(batch)):
                    batch[place] = by_row[n]
                    n += 1
        cuts.append(frames)
    kinds = {name: draw(column_types(configuration, name, name in weighted, ids)) for name in sorted(names)}
    has_rates = rates in ("column", "both")
    return Stream(parts, kinds, kind == "step", has_rates, contribution_rows, contributor, call_rates, cuts)


@st.composite
def column_types(draw, configuration, name, weighted, ids):
    """The Arrow type of the column of a feature."""
    feature = next(item for item in configuration.features if item.name == name)
    width = configuration.table(feature.table).dim * max(feature.length, 1)
    floats = st.sampled_from([pa.float32(), pa.float32(), pa.float64()])
    value = draw(floats)
    listed = [pa.list_(value, width), pa.list_(value, width), pa.list_(value), pa.large_list(value)]
    fields = [
        ("ids", draw(st.sampled_from([pa.list_(ids), pa.large_list(ids)]))),
        ("gradient", draw(st.sampled_from(listed))),
    ]
    if weighted:
        fields.append(("weights", pa.list_(draw(floats))))
    return pa.struct(fields)
