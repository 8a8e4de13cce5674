"""Generate a synthetic gradient log and a matching configuration.

The log is a row stream as a producer would send it: ``id``, ``gradient``, ``step``, and ``table`` where there
are several tables. It is drawn and written batch by batch, so memory does not grow with the number of rows; zipf
distributions keep a cumulative table of 8 bytes per vocabulary entry (10 million ids: 80 MB).

The same options give the same bytes, with the same versions of numpy and pyarrow. Ids, gradients and the split of a
step over tables each have a separate random stream, read in order: neither the batch size nor
the number of rows changes the earlier rows.

A stream is written as a log with checksums (``penstock.io.log``).

``dlrm`` imitates the *shape* of production recommendation traces: many tables of different widths, vocabularies spread
over three decades, very uneven numbers of rows, and reuse that differs by table. It contains no real data, and its
parameters are not fitted to any trace.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

import penstock.interrupts as interrupts
from penstock.config.embedding import EmbeddingConfig
from penstock.config.optimizers import Adagrad
from penstock.config.tables import TableConfig
from penstock.errors import UsageError
from penstock.io.decoding.schema import TABLE_KEY
from penstock.io.log import LogWriter
from penstock.io.storage import atomic_files

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

DISTRIBUTIONS = ("zipf", "uniform", "dlrm")
DLRM_TABLES = 8
DLRM_DIMS = (4, 8, 16, 32, 64, 128)

LEARNING_RATE = 0.05
GRADIENT_STDDEV = np.float32(0.01)

CONFIG_SUFFIX = ".pbtxt"
NOT_ARROW = (".csv", ".tsv", ".json", ".jsonl", ".txt")  # who asks for these would not get them
FILE_SUFFIXES = (".arrow", ".feather")

# Rank → id, so that the frequent ids do not lie side by side. A bijection: the multiplier is a prime above every
# vocabulary allowed. The product stays below 2^63: rank < 2^31, multiplier < 2^32.
_MULTIPLIER, _OFFSET = 2_654_435_761, 12_345
_MAX_VOCABULARY = 1 << 31

_MAX_ROWS = 10**15
_MAX_TABLES = 10_000
_MAX_DIM = 1 << 16
_MAX_SEED = (1 << 63) - 1
_BATCH_ROWS = 1 << 16
_BATCH_FLOATS = 1 << 25  # 128 MB of gradients: very wide rows come in smaller batches


@dataclass(frozen=True)
class SynthOptions:
    """The options of a synthetic log. Errors name the flags of ``penstock synth``.

    rows : of the whole log; the last step has the remainder
    tables : None: 1, for "dlrm" 8
    vocabulary : ids of every table; of the largest one for "dlrm"
    dim : of every table; "dlrm" has its own
    alpha : exponent of zipf; the mean of the tables' for "dlrm"; "uniform" has none
    """

    rows: int = 100_000
    rows_per_step: int = 8_192
    tables: int | None = None
    vocabulary: int = 100_000
    dim: int = 32
    distribution: str = "zipf"
    alpha: float = 1.1
    seed: int = 0

    def __post_init__(self) -> None:
        _check_range("--rows", self.rows, 0, _MAX_ROWS)
        _check_range("--rows-per-step", self.rows_per_step, 1, _MAX_ROWS)
        _check_range("--tables", 1 if self.tables is None else self.tables, 1, _MAX_TABLES)
        _check_range("--vocabulary", self.vocabulary, 1, _MAX_VOCABULARY)
        _check_range("--dim", self.dim, 1, _MAX_DIM)
        _check_range("--seed", self.seed, 0, _MAX_SEED)
        if self.distribution not in DISTRIBUTIONS:
            raise UsageError(f"--distribution: expected one of {', '.join(DISTRIBUTIONS)}, got '{self.distribution}'")
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise UsageError(f"--alpha: expected a finite number of at least 0, got {self.alpha}")

    @property
    def num_steps(self) -> int:
        return -(-self.rows // self.rows_per_step)


@dataclass(frozen=True)
class SynthTable:
    """One table of a log. share : of the rows; alpha : exponent of zipf, None where ids are uniform."""

    name: str
    vocabulary_size: int
    dim: int
    share: float
    alpha: float | None


@dataclass(frozen=True)
class Written:
    """The tables, rows and files of a written log. rows : by table"""

    log: Path
    config: Path
    tables: tuple[SynthTable, ...]
    rows: Mapping[str, int]
    num_steps: int
    num_bytes: int


def write_synthetic(out: str | os.PathLike[str], options: SynthOptions | None = None) -> Written:
    """Write a log to ``out`` and its configuration next to it, with the suffix ``.pbtxt``; replace existing files.

    ``.parquet`` makes Parquet, ``.arrow`` and ``.feather`` an Arrow IPC file, any other suffix an Arrow IPC stream.
    The log appears under its name only when it is complete and durable. Raises UsageError and OSError.
    """
    path, options = Path(out), options or SynthOptions()
    _check_out(path)
    log = _Log(options)
    unfinished = atomic_files.unfinished(path)
    with atomic_files.written(unfinished, path) as file:
        _write(file, path.suffix.lower(), log.schema, log.batches())
    config = path.with_suffix(CONFIG_SUFFIX)
    try:
        config_of(log.tables).save(config)
        atomic_files.rename(unfinished, path)
        atomic_files.sync_folder(path.parent)
    except BaseException:
        atomic_files.discard(unfinished)
        raise
    num_bytes = path.stat().st_size
    rows = {table.name: int(count) for table, count in zip(log.tables, log.rows, strict=True)}
    return Written(path, config, log.tables, rows, options.num_steps, num_bytes)


def config_of(tables: Iterable[SynthTable]) -> EmbeddingConfig:
    """Return the configuration of a log: every table with Adagrad."""
    configs = [TableConfig(t.vocabulary_size, t.dim, name=t.name) for t in tables]
    return EmbeddingConfig.from_tables(configs, Adagrad(LEARNING_RATE))


def tables_of(options: SynthOptions, rng: np.random.Generator) -> tuple[SynthTable, ...]:
    """Return the tables of a log; those of "dlrm" are drawn."""
    dlrm = options.distribution == "dlrm"
    num = options.tables or (DLRM_TABLES if dlrm else 1)
    names = [f"table_{i}" for i in range(num)]
    if not dlrm:
        alpha = options.alpha if options.distribution == "zipf" else None
        return tuple(SynthTable(name, options.vocabulary, options.dim, 1 / num, alpha) for name in names)
    smallest = max(1, options.vocabulary // 1000)
    sizes = np.geomspace(options.vocabulary, smallest, num).round().astype(np.int64)
    sizes[0] = options.vocabulary
    shares = rng.lognormal(0.0, 1.0, num)
    alphas = np.maximum(0.0, options.alpha + rng.uniform(-0.3, 0.3, num))
    dims = [DLRM_DIMS[i % len(DLRM_DIMS)] for i in range(num)]
    values = zip(names, rng.permutation(sizes).tolist(), dims, shares / shares.sum(), alphas.tolist(), strict=True)
    return tuple(SynthTable(name, size, dim, float(share), alpha) for name, size, dim, share, alpha in values)


class _Ids:
    """Draws the ids of one table."""

    def __init__(self, table: SynthTable, known: dict[tuple[int, float], Float64]) -> None:
        """known : cumulative tables by (vocabulary_size, alpha), shared by the tables that are alike"""
        self._size = table.vocabulary_size
        self._cumulative = None
        if table.alpha is not None:
            key = (self._size, table.alpha)
            if key not in known:
                known[key] = _zipf_cumulative(*key)
            self._cumulative = known[key]

    def draw(self, rng: np.random.Generator, count: int) -> Int64:
        if self._cumulative is None:
            return rng.integers(0, self._size, count)
        ranks = np.searchsorted(self._cumulative, rng.random(count), side="right")
        ids: Int64 = (ranks * _MULTIPLIER + _OFFSET) % self._size
        return ids


def _zipf_cumulative(size: int, alpha: float) -> Float64:
    """P(rank <= r) for P(r) ∝ (r+1)^-alpha: what inverse sampling looks up. Ends in exactly 1, and random() < 1."""
    table = np.arange(1, size + 1, dtype=np.float64)
    np.power(table, -alpha, out=table)
    np.cumsum(table, out=table)
    table /= table[-1]
    return table


class _Log:
    """The rows of a log, as record batches. rows : drawn so far, by table"""

    def __init__(self, options: SynthOptions) -> None:
        seeds = np.random.SeedSequence(options.seed).spawn(4)
        layout, self._splits, self._id_stream, self._gradients = (np.random.default_rng(s) for s in seeds)
        self._options = options
        self.tables = tables_of(options, layout)
        # The same in every step, and not the configuration's.
        self._order = layout.permutation(len(self.tables)).tolist()
        self.rows = np.zeros(len(self.tables), np.int64)
        known: dict[tuple[int, float], Float64] = {}
        self._ids = [_Ids(table, known) for table in self.tables]
        self._names = pa.array([t.name for t in self.tables], pa.utf8())
        self._dims = np.array([t.dim for t in self.tables])
        self._batch_rows = min(_BATCH_ROWS, max(1, _BATCH_FLOATS // int(self._dims.max())))
        self.schema = self._schema()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Every step's rows; no batch holds rows of two steps."""
        left = self._options.rows
        for step in range(self._options.num_steps):
            interrupts.check()
            rows = min(left, self._options.rows_per_step)
            left -= rows
            for runs in _cut(self._runs(rows), self._batch_rows):
                yield self._batch(step, runs)

    def _schema(self) -> pa.Schema:
        floats = pa.list_(pa.float32(), int(self._dims[0])) if len({*self._dims}) == 1 else pa.list_(pa.float32())
        kinds = {"step": pa.int64(), "id": pa.int64(), "gradient": floats}
        if len(self.tables) == 1:
            metadata = {TABLE_KEY: self.tables[0].name}
        else:
            kinds, metadata = {"table": pa.dictionary(pa.int32(), pa.utf8()), **kinds}, None
        return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()], metadata)

    def _runs(self, rows: int) -> list[tuple[int, int]]:
        """A step's rows as (table, number) runs: drawn, so that small steps reach every table in time."""
        if len(self.tables) == 1:
            counts = np.array([rows])
        else:
            counts = self._splits.multinomial(rows, [t.share for t in self.tables])
        self.rows += counts
        return [(table, int(counts[table])) for table in self._order]

    def _batch(self, step: int, runs: list[tuple[int, int]]) -> pa.RecordBatch:
        codes = np.repeat(np.array([t for t, _ in runs], np.int32), [n for _, n in runs])
        ids = np.concatenate([self._ids[t].draw(self._id_stream, n) for t, n in runs])
        values = self._gradients.standard_normal(int(self._dims[codes].sum()), np.float32)
        values *= GRADIENT_STDDEV
        columns = [pa.array(np.full(len(codes), step)), pa.array(ids), self._lists(values, codes)]
        if len(self.tables) > 1:
            columns.insert(0, pa.DictionaryArray.from_arrays(codes, self._names))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _lists(self, values: npt.NDArray[np.float32], codes: npt.NDArray[np.int32]) -> pa.Array:
        kind = self.schema.field("gradient").type
        if pa.types.is_fixed_size_list(kind):
            return pa.FixedSizeListArray.from_arrays(pa.array(values), type=kind)
        offsets = np.zeros(len(codes) + 1, np.int32)  # at most _BATCH_FLOATS
        np.cumsum(self._dims[codes], out=offsets[1:])
        return pa.ListArray.from_arrays(offsets, pa.array(values), type=kind)


def _cut(runs: Iterable[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """The runs of a step → the runs of its batches, none over ``most`` rows."""
    batch: list[tuple[int, int]] = []
    room = most
    for table, rows in runs:
        while rows:
            taken = min(rows, room)
            batch.append((table, taken))
            rows, room = rows - taken, room - taken
            if not room:
                yield batch
                batch, room = [], most
    if batch:
        yield batch


# ---- containers


def _write(file: Any, suffix: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """All of it, and the container's end."""
    if suffix == ".parquet":
        # A row group per batch would be thousands of tiny ones where steps are small. Random floats do not compress.
        names = [name for name in ("table", "step") if name in schema.names]
        with pa.parquet.ParquetWriter(file, schema, compression="none", use_dictionary=names) as writer:
            for group in _grouped(batches):
                writer.write_table(group)
        return
    if suffix in FILE_SUFFIXES:
        with pa.ipc.new_file(file, schema) as arrow:
            for batch in batches:
                arrow.write_batch(batch)
        return
    with LogWriter(file, schema) as log:
        for batch in batches:
            log.write(batch)


def _grouped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches as tables of at least _BATCH_ROWS rows, but for the last."""
    group: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        group.append(batch)
        rows += batch.num_rows
        if rows >= _BATCH_ROWS:
            yield pa.Table.from_batches(group)
            group, rows = [], 0
    if group:
        yield pa.Table.from_batches(group)


# ---- what was asked for


def _check_range(flag: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UsageError(f"{flag}: expected {least} to {most}, got {value}")


def _check_out(path: Path) -> None:
    """Refuse to replace anything but a file: a rename onto a device or a pipe would replace it."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise UsageError(f"OUT: expected a file, {path} is a device or a pipe")
    if path.name == "-":
        raise UsageError("OUT: expected the name of a file: a configuration is written beside it, not to stdout")
    if path.suffix.lower() in NOT_ARROW:
        raise UsageError(f"OUT: {path}: logs are Arrow or Parquet; give it another suffix, such as .arrows or .parquet")
    if path.suffix.lower() == CONFIG_SUFFIX:
        raise UsageError(f"OUT: {path} is the name of the configuration; give the log another suffix, such as .arrows")
