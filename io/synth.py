"""Generate a synthetic gradient log and a matching configuration.

The log is a row stream as a producer would send it: ``id``, ``gradient``, ``step``, and ``table`` where there
are several tables. It is drawn and written batch by batch, so memory does not grow with the number of rows; zipf
distributions keep a cumulative table of 8 bytes per vocabulary entry (10 million ids: 80 MB).

The same options give the same rows on every machine (``exact_draws``), and the same bytes with the same version of
pyarrow. Ids, gradients and the split of a step over tables each have a separate random stream, read in order: neither
the batch size nor, without churn, the number of rows changes the earlier rows. ``synthetic_ids`` defines the ids.

A stream is written as a log with checksums (``penstock.io.log``).

``dlrm`` imitates the *shape* of production recommendation traces: many tables of different widths, vocabularies spread
over three decades, very uneven numbers of rows, and reuse that differs by table. It contains no real data, and its
parameters are not fitted to any trace.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

import penstock.base.interrupts as interrupts
from penstock.base.errors import UsageError
from penstock.base.filesystem import atomic_files
from penstock.io.decoding.schema import TABLE_KEY
from penstock.io.exact_draws import E, ExactDraws, power
from penstock.io.list_columns import list_column, list_type
from penstock.io.log import LogWriter
from penstock.io.synthetic_ids import IdStream, SynthTable
from penstock.model.config.dynamic import Dynamic
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import TableConfig
from penstock.model.frames import Int64
from penstock.model.updates import Adagrad

DISTRIBUTIONS = ("zipf", "uniform", "dlrm")
IDS = ("dense", "hashed")
MAX_CHURN = 1000.0
DLRM_TABLES = 8
DLRM_DIMS = (4, 8, 16, 32, 64, 128)

LEARNING_RATE = 0.05
GRADIENT_STDDEV = np.float32(0.01)

CONFIG_SUFFIX = ".pbtxt"
NOT_ARROW = (".csv", ".tsv", ".json", ".jsonl", ".txt")  # formats that synth does not write
FILE_SUFFIXES = (".arrow", ".feather")

_MAX_ROWS = 10**15
_RANGES = {
    "rows": (0, _MAX_ROWS),
    "rows_per_step": (1, _MAX_ROWS),
    "tables": (1, 10_000),
    "vocabulary": (1, 1 << 31),
    "dim": (1, 1 << 16),
    "seed": (0, (1 << 63) - 1),
}
_BATCH_ROWS = 1 << 16
_BATCH_FLOATS = 1 << 25  # 128 MB of gradients: batches of very wide rows are smaller


@dataclass(frozen=True)
class SynthOptions:
    """The options of a synthetic log. Errors name the flags of ``penstock synth``.

    rows : of the whole log; the last step has the remainder
    tables : None: 1, for "dlrm" 8
    vocabulary : ids of every table; of the largest one for "dlrm"
    dim : of every table; "dlrm" has its own
    alpha : exponent of zipf; the mean of the tables' for "dlrm"; "uniform" has none
    ids : "dense": below the vocabulary; "hashed": any int64, of dynamic tables
    churn : the share of the vocabulary that is replaced by new keys from the first step to the last; only of hashed ids
    """

    rows: int = 100_000
    rows_per_step: int = 8_192
    tables: int | None = None
    vocabulary: int = 100_000
    dim: int = 32
    distribution: str = "zipf"
    alpha: float = 1.1
    ids: str = "dense"
    churn: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UsageError(f"--{name.replace('_', '-')}: expected {least} to {most}, got {value}")
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise UsageError(f"--alpha: expected a finite number of at least 0, got {self.alpha}")
        if not 0 <= self.churn <= MAX_CHURN:
            raise UsageError(f"--churn: expected a number from 0 to {MAX_CHURN:g}, got {self.churn}")
        if self.churn and self.ids != "hashed":
            raise UsageError("--churn: dense ids cannot be replaced; add --ids hashed")

    @property
    def num_steps(self) -> int:
        return -(-self.rows // self.rows_per_step)


@dataclass(frozen=True)
class Written:
    """The tables, rows and files of a written log. rows : by table; capacities : the rows of the configured tables"""

    log: Path
    config: Path
    tables: tuple[SynthTable, ...]
    rows: Mapping[str, int]
    capacities: Mapping[str, int]
    num_steps: int
    num_bytes: int


def write_synthetic(out: str | os.PathLike[str], options: SynthOptions | None = None) -> Written:
    """Write a log to ``out`` and its configuration next to it, with the suffix ``.pbtxt``; replace existing files.

    ``.parquet`` makes Parquet, ``.arrow`` and ``.feather`` an Arrow IPC file, any other suffix an Arrow IPC stream.
    The log appears under its name only when it is complete and durable. Raises UsageError and OSError.
    """
    path, options = Path(out), options or SynthOptions()
    _check_out(path)
    log, config = _Log(options), path.with_suffix(CONFIG_SUFFIX)
    with atomic_files.publishing(path) as file:
        _write(file, path.suffix.lower(), log.schema, log.batches())
        file.sync()
        configured = EmbeddingConfig.from_tables([_config_of(t, options) for t in log.tables], Adagrad(LEARNING_RATE))
        configured.save(config)
    rows = {table.name: int(count) for table, count in zip(log.tables, log.rows, strict=True)}
    capacities = {name: capacity for name, (capacity, _) in configured.sizes.items()}
    return Written(path, config, log.tables, rows, capacities, options.num_steps, path.stat().st_size)


def tables_of(options: SynthOptions, draws: ExactDraws) -> tuple[SynthTable, ...]:
    """Return the tables of a log; those of "dlrm" are drawn."""
    dlrm = options.distribution == "dlrm"
    num = options.tables or (DLRM_TABLES if dlrm else 1)
    names = [f"table_{i}" for i in range(num)]
    if not dlrm:
        alpha = options.alpha if options.distribution == "zipf" else None
        return tuple(SynthTable(name, options.vocabulary, options.dim, 1 / num, alpha) for name in names)
    smallest = max(1, options.vocabulary // 1000)
    decline = power(np.array([smallest / options.vocabulary]), np.arange(num) / max(1, num - 1))  # geometric
    sizes = np.rint(options.vocabulary * decline).astype(np.int64)
    weights = power(np.full(num, E), draws.normals(num).astype(np.float64))  # lognormal
    shares = weights / np.cumsum(weights)[-1]
    alphas = np.maximum(0.0, options.alpha + (draws.units(num) * 0.6 - 0.3))
    dims = [DLRM_DIMS[i % len(DLRM_DIMS)] for i in range(num)]
    values = zip(names, sizes[draws.permutation(num)].tolist(), dims, shares, alphas.tolist(), strict=True)
    return tuple(SynthTable(name, size, dim, float(share), alpha) for name, size, dim, share, alpha in values)


def _config_of(table: SynthTable, options: SynthOptions) -> TableConfig:
    """Return the configuration of a table; for hashed ids, a dynamic one with room for a quarter more than is alive."""
    if options.ids == "dense":
        return TableConfig(table.vocabulary_size, table.dim, name=table.name)
    capacity = min(table.vocabulary_size + table.vocabulary_size // 4 + 1, (1 << 31) - 1)
    return TableConfig(capacity, table.dim, name=table.name, dynamic=Dynamic(evict="lru"))


class _Log:
    """The rows of a log, as record batches. rows : drawn so far, by table"""

    def __init__(self, options: SynthOptions) -> None:
        seeds = np.random.SeedSequence(options.seed).spawn(5)
        layout, self._splits, ids, self._gradients, keys = map(ExactDraws, seeds)
        self._options = options
        self.tables = tables_of(options, layout)
        self.rows = np.zeros(len(self.tables), np.int64)
        # The order of the tables within a step: the same in every step, and not the configuration's.
        self._order = layout.permutation(len(self.tables)).tolist()
        shares = np.cumsum([table.share for table in self.tables])
        self._split_ends = shares / shares[-1]
        hashed = keys if options.ids == "hashed" else None
        self._id_stream = IdStream(self.tables, ids, hashed, options.churn, options.num_steps)
        self._names = pa.array([t.name for t in self.tables], pa.utf8())
        self._dims = np.array([t.dim for t in self.tables])
        self._batch_rows = min(_BATCH_ROWS, max(1, _BATCH_FLOATS // int(self._dims.max())))
        self.schema = self._schema()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield every step's rows; no batch has rows of two steps."""
        for step in range(self._options.num_steps):
            interrupts.check()
            rows = min(self._options.rows_per_step, self._options.rows - step * self._options.rows_per_step)
            ends = np.cumsum(self._counts(rows)[self._order])
            for first in range(0, rows, self._batch_rows):
                within = np.clip(ends, first, first + self._batch_rows)
                yield self._batch(step, np.diff(within, prepend=first).tolist())

    def _schema(self) -> pa.Schema:
        floats = list_type(self._dims)
        kinds = {"step": pa.int64(), "id": pa.int64(), "gradient": floats}
        if len(self.tables) == 1:
            metadata = {TABLE_KEY: self.tables[0].name}
        else:
            kinds, metadata = {"table": pa.dictionary(pa.int32(), pa.utf8()), **kinds}, None
        return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()], metadata)

    def _counts(self, rows: int) -> Int64:
        """Draw the rows of a step for each table, so that small steps reach every table in time."""
        num_tables = len(self.tables)
        counts = np.zeros(num_tables, np.int64)
        if num_tables == 1:
            counts += rows
        else:
            for first in range(0, rows, _BATCH_ROWS):
                drawn = self._splits.units(min(_BATCH_ROWS, rows - first))
                tables = np.searchsorted(self._split_ends, drawn, side="right")
                counts += np.bincount(tables, minlength=num_tables)
        self.rows += counts
        return counts

    def _batch(self, step: int, counts: list[int]) -> pa.RecordBatch:
        """Draw a batch. counts : rows of each table, in the order of the tables within a step"""
        codes = np.repeat(np.array(self._order, np.int32), counts)
        drawn = [self._id_stream.draw(t, n, step) for t, n in zip(self._order, counts, strict=True) if n]
        values = self._gradients.normals(int(self._dims[codes].sum()))
        values *= GRADIENT_STDDEV
        gradients = list_column(values, self.schema.field("gradient").type, self._dims[codes])
        columns = [pa.array(np.full(len(codes), step)), pa.array(np.concatenate(drawn)), gradients]
        if len(self.tables) > 1:
            columns.insert(0, pa.DictionaryArray.from_arrays(codes, self._names))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _write(file: Any, suffix: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write a whole log."""
    if suffix == ".parquet":
        _write_parquet(file, schema, batches)
        return
    with pa.ipc.new_file(file, schema) if suffix in FILE_SUFFIXES else LogWriter(file, schema) as log:
        for batch in batches:
            log.write(batch)


def _write_parquet(file: Any, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write row groups of at least _BATCH_ROWS rows, except for the last: the batches of small steps are tiny."""
    group: list[pa.RecordBatch] = []
    rows = 0
    # Random floats do not compress.
    names = [name for name in ("table", "step") if name in schema.names]
    with pa.parquet.ParquetWriter(file, schema, compression="none", use_dictionary=names) as writer:
        for batch in batches:
            group.append(batch)
            rows += batch.num_rows
            if rows >= _BATCH_ROWS:
                writer.write_table(pa.Table.from_batches(group))
                group, rows = [], 0
        if group:
            writer.write_table(pa.Table.from_batches(group))


def _check_out(path: Path) -> None:
    """Refuse what a log or its configuration cannot be written to; a folder is refused where it is opened."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(f"OUT: expected a file, {path} is a device or a pipe")
    if path.name == "-":
        raise UsageError("OUT: expected the name of a file: a configuration is written next to it, not to stdout")
    if path.suffix.lower() in NOT_ARROW:
        raise UsageError(f"OUT: {path}: logs are Arrow or Parquet; give it another suffix, such as .arrows or .parquet")
    if path.suffix.lower() == CONFIG_SUFFIX:
        raise UsageError(f"OUT: {path} is the name of the configuration; give the log another suffix, such as .arrows")
