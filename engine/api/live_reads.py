"""An engine's tables for reads without its lock: by threads of this process, and by others from shared files.

``LiveReads`` observes the steps of a core, so that a read of several tables can be of one step.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError, listed
from penstock.checkpoint.engine_state import encoded
from penstock.checkpoint.session import CheckpointSession
from penstock.core.engine_core import EngineCore
from penstock.core.freshness import ROW
from penstock.core.observers import ALL_UNSEEN, Pushed, StepObserver, Stepped, Unseen
from penstock.model.config.specs import TableSpec
from penstock.model.frames import Float32, Int64
from penstock.model.version import LookupResult, Version
from penstock.pyx.row_keys import RowKeys, num_words
from penstock.pyx.row_reads import StepWords
from penstock.rows.bridge.host_tables import MOST_COUNTING
from penstock.rows.bridge.sharding import NUM_SHARDS
from penstock.rows.shared.folder import SharedFolder
from penstock.rows.shared.header import KeyFile, TableLayout
from penstock.rows.shared.lookups import Deadline, TableReads, read_tables

_NUM_WORDS = 8


class LiveReads(StepObserver):
    """Reads rows of an engine while its steps run: ``Engine.reads`` returns the only one of an engine.

    core : of the engine; folder : of its shared tables, to publish; None: only threads of this process read
    session : of the engine, which knows lineage, epoch and commits

    The first one switches the counters of pages on, for all steps to come. Call it while no step runs.
    Raises ConfigError if a table is not in the host's memory, or the engine has only a share of the rows.
    """

    def __init__(self, core: EngineCore, folder: SharedFolder | None, session: CheckpointSession) -> None:
        check_on_host(core)
        self._core, self._folder, self._session = core, folder, session
        self._file_of: Callable[[npt.NDArray[Any]], str] = (lambda array: "") if folder is None else folder.name
        self._tables = {name: self._reads(spec) for name, spec in core.tables.held.specs.items()}
        self._problem: ConfigError | None = None  # why tables cannot be read any more
        self._words = StepWords(np.zeros(_NUM_WORDS, np.uint64))
        self._words.end(core.global_step)
        if folder is not None:
            layouts = [table.layout for table in self._tables.values()]
            config = hashlib.sha256(encoded(core.config).encode()).hexdigest()
            threads = min(core.pipeline.team.threads + 1, MOST_COUNTING)
            self._words = folder.publish(layouts, threads, self._ahead(), session.durable_step or 0, config)
            core.failure.is_shared = True
        self._words.frame_time = core.freshness.newest.get(ROW)
        for name in core.tables.held.specs:
            self._note_steps(name)
        core.observe(self)

    def _note_steps(self, name: str) -> None:
        on_host = self._core.tables.table(name).on_host
        assert on_host is not None
        on_host[0].note_steps(self._words.memory)

    @overload
    def lookup(self, table: str, ids: Any, consistent: bool = False, timeout_ms: int = 1000) -> Float32: ...

    @overload
    def lookup(self, table: Mapping[str, Any], *, consistent: bool = False, timeout_ms: int = 1000) -> LookupResult: ...

    def lookup(
        self, table: str | Mapping[str, Any], ids: Any = None, consistent: bool = False, timeout_ms: int = 1000
    ) -> Float32 | LookupResult:
        """Return the weights of some ids of a table, or of several tables, as ``Reader.lookup`` does."""
        if isinstance(table, str):
            return self.lookup({table: ids}, consistent=consistent, timeout_ms=timeout_ms)[table]
        deadline = Deadline(timeout_ms)
        self._core.failure.check_readable()

        def check(reason: str) -> None:
            self._core.failure.check_readable()
            deadline.check(reason)

        tables = None
        if self._problem is not None:
            raise ConfigError(str(self._problem))
        while tables is not self._tables:  # else rows are of arrays that a table has left since
            tables = self._tables
            rows, step = read_tables(tables, self._words, table, {}, consistent, check, "in the configuration")
        return LookupResult(rows, self._session.positions.version(step), self._session.durable_step)

    def begin_epoch(self) -> None:
        """Tell readers of the files whose steps follow. Call it while no step runs."""
        if self._folder is not None and self._folder.history is not None:
            self._words.begin()
            self._folder.history.write(self._ahead())
            self._ended()

    def _ahead(self) -> Version:
        """Return the present version, of the epoch that the steps to come are of."""
        lineage, step = self._session.positions.lineage, self._core.global_step
        return Version(str(step)) if lineage is None else lineage.ahead(step)

    def durable(self, step: int) -> None:
        """A commit of a step is on disk. Raises OSError if the files are not there any more."""
        self._words.durable_step = step
        if self._folder is not None:
            self._folder.check_there()

    def _ended(self) -> None:
        """Tell readers that rows are those of the core's step; the time comes last, so that no row is older."""
        self._words.end(self._core.global_step)
        self._words.frame_time = self._core.freshness.newest.get(ROW)

    # ---- the core's steps and loads

    def most_unseen(self) -> Unseen:
        """Return any number: steps in native code begin and end in the same words (``HostTables.note_steps``)."""
        return ALL_UNSEEN

    def before_step(self, coalesced: Stepped) -> None:
        self._words.begin()

    def pushed(self, pushed: Pushed) -> None:
        if pushed.seconds:
            self._ended()

    def core_failed(self, error: BaseException) -> None:
        if self._folder is not None:
            self._folder.fail()

    def before_load(self) -> None:
        self._words.begin()

    def thawed(self, specs: Sequence[TableSpec]) -> None:
        try:
            check_on_host(self._core)
        except ConfigError as error:  # the new optimizer has no kernel
            self._problem = error
        else:
            moved = {}
            for spec in specs:
                before = self._tables[spec.name]
                moved[spec.name] = self._reads(spec, (before.keys, before.layout.keys))
                self._note_steps(spec.name)
            self._tables = {**self._tables, **moved}
        self._ended()

    def load_refused(self) -> None:
        self._ended()

    def loaded(self, name: str, ids: Int64 | None) -> None:
        self._ended()

    # ---- inside

    def _reads(self, spec: TableSpec, keys_before: tuple[RowKeys | None, KeyFile | None] | None = None) -> TableReads:
        on_host = self._core.tables.table(spec.name).on_host
        assert on_host is not None
        tables, member = on_host
        tables.count_pages()
        rule, layout = tables.rules[member], tables.layouts[member]
        keys, file = keys_before or self._keys(spec)
        described = TableLayout(
            spec.name,
            layout.dim,
            layout.vocabulary_size,
            NUM_SHARDS,
            layout.mod,
            layout.rows_per_shard,
            layout.shards_per_device,
            rule.row_floats,
            rule.first_float,
            rule.first_page,
            tuple(map(self._file_of, tables.arrays)),
            tuple(map(self._file_of, tables.counters)),
            spec.id_type,
            file,
        )
        return TableReads(described, list(zip(tables.arrays, tables.counters, strict=True)), keys)

    def _keys(self, spec: TableSpec) -> tuple[RowKeys | None, KeyFile | None]:
        if spec.dynamic is None:
            return None, None
        capacity, salt = spec.vocabulary_size, secrets.randbits(64)
        expire_after = -1 if spec.dynamic.expire_after is None else spec.dynamic.expire_after
        if self._folder is None:
            memory = np.zeros(num_words(capacity), np.uint64)
        else:
            memory = self._folder.allocate("keys", num_words(capacity), np.uint64)
        keys, table = RowKeys(memory, capacity, salt, expire_after), self._core.tables.dynamic[spec.name]
        table.publish_keys(keys)
        return keys, KeyFile(self._file_of(memory), salt, expire_after, table.absent)


def check_on_host(core: EngineCore) -> None:
    """Raise ConfigError unless all rows of all tables are in the host's memory; UsageError for a share of the rows."""
    tables = core.tables
    tables.held.check_all("reading without a lock")
    others = [name for name in tables.specs if tables.table(name).on_host is None]
    if others:
        raise ConfigError(
            f"table {listed(others)}: its rows are not in the host's memory (devices, a cache, 16-bit weights or an "
            "optimizer without a kernel), and only such rows can be shared; place the table on HOST, or omit --shared"
        )
