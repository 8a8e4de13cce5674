"""The Engine: tables on devices, and the one way from a source of gradients to them.

The composition root of the library: it joins reader, pipeline and bridge, and holds what belongs to
none of them (configuration, global step, whether a step failed half way). jax is loaded when an
Engine is made, not before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from penstock.accumulators.gradient_checks import contributor_of
from penstock.activations.deduplication import DeduplicationData
from penstock.activations.exchange import Exchange
from penstock.between_steps import between_steps, check_gradients, checked_reduction
from penstock.checkpoint.engine_state import restore
from penstock.checkpoint.session import Saves
from penstock.config.embedding import EmbeddingConfig
from penstock.deltas import DeltaArguments, Deltas
from penstock.errors import ConfigError, StateError
from penstock.frames import Coalesced, Frame
from penstock.io.decoding.frame_from_arrays import one_frame
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.learning_rates import Given, LearningRates
from penstock.pipeline import BadRowsError, Begin, FrameGate, Pipeline
from penstock.stage import RunArguments, StageArguments, run, stage
from penstock.stats import Contributor, Counters, ProcessReport, Report
from penstock.table_accumulator import TableStore
from penstock.tables.table_set import State
from penstock.telemetry import Watch
from penstock.threads import num_threads
from penstock.validation import place, whole

if TYPE_CHECKING:
    import jax
    import pyarrow as pa

Float32 = npt.NDArray[np.float32]


class Engine:
    """Applies sparse gradients to embedding tables, as TensorFlow's TPU embedding would.

    config : what the tables are
    mesh : a ``jax.sharding.Mesh``, whose devices share the rows of every table; None: all local devices
    num_required : frames that open the gate; None: the configuration's, else 1
    reduction : "mean" divides each row's sum by the frames that held it, "sum" does not; None: the
        configuration's, else "mean"
    seed : of the tables' random start
    threads : of the host, and of a device that is a CPU; None: all of this process. Results do not depend on it.

    May be used from several threads: frames enter one by one, in the order in which they get the gate's lock,
    and tables are read and written between two steps.
    """

    def __init__(
        self,
        config: EmbeddingConfig,
        mesh: jax.sharding.Mesh | None = None,
        num_required: int | None = None,
        reduction: str | None = None,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        self.reduction = reduction = checked_reduction(config, mesh, reduction)
        self.config = config
        self.seed = whole("seed", seed)
        self._failed: str | None = None
        self._rates = self._own_rates = LearningRates(config.num_tags, None, config.schedules)
        self._last_rates: tuple[float, ...] | None = None
        self._state = self._make_state(mesh, num_threads(threads))
        self._counters = Counters()  # of apply and flush, which report nothing
        self._saves = self._make_saves()
        self._watchers: WeakSet[Deltas] = WeakSet()
        self._changed_step = 0  # the last one that touched a row
        self.watch = Watch(lambda name, ids: self._state.table(name).read(ids))
        required = config.gate_num_required or 1 if num_required is None else whole("num_required", num_required, 1)
        gate = FrameGate(required, self.apply)
        is_share = self._state.is_share
        stores = {
            name: TableStore(
                spec.vocabulary_size, spec.dim, accumulate=spec.accumulate, mean=reduction == "mean", is_share=is_share
            )
            for name, spec in self._state.held.items()
        }
        self._gate, self._pipeline = gate, Pipeline(gate, stores, self._step, threads)
        from penstock.bridge.tracing import is_staging  # not before: it loads jax

        self._exchange = Exchange(config, self._seen, self._take_in, gate, is_staging)

    # ---- gradients in

    def run(self, source: Any, **arguments: Unpack[RunArguments]) -> Report:
        """Apply a source of gradients, frame by frame, to its end.

        source : a path, a directory, "-", a URI, anything with ``__arrow_c_stream__``, a pyarrow dataset or scanner, a
            polars LazyFrame, a binary file, an iterator of record batches, or a list of sources
        arguments : table, columns, contribution_rows, merge, learning_rates, on_bad_row, flush, limit, max_stale,
            gradient_dtype, allow_missing_end, checkpoint, every, keep, resume, progress:
            ``penstock.run.FlowArguments``; deltas, and what they hold: ``penstock.stage.RunArguments``

        Raises InputError or ConfigError; the frames before the bad one stay applied, it and the
        rest are not. What the gate holds at the end stays for the next run, counted as ``pending``.
        Where other threads push at the same time, the report counts this source's frames and the steps that they
        opened; what it says of tables counts everything that entered since the run began.
        """
        return run(self, source, **arguments)

    def stage(self, source: Any, **arguments: Unpack[StageArguments]) -> pa.RecordBatchReader:
        """Apply a source as ``run`` does, and give the rows that change as an Arrow stream (docs/deltas.md).

        arguments : what ``run`` takes, and slots, op, numbered, per_steps, per_rows, per_seconds:
            ``penstock.deltas.DeltaArguments``

        Nothing is read before a batch is asked for, and no more than it takes. Who lets the reader go ends the run
        there, at a whole frame. Errors come out of the pull that meets them.
        """
        return stage(self, source, **arguments)

    def apply(
        self,
        gradients: Mapping[str, tuple[Any, Any]],
        local_step: int | None = None,
        learning_rates: Given = None,
        contributor: Contributor = None,
    ) -> bool:
        """Take in one frame given as arrays. ``engine.gate.push`` is the same, for producers that hold only the gate.

        gradients : table → (ids, gradients): integers (n,), floats (n, dim); numpy, jax or Arrow arrays
        local_step : the producer's step; behind ``global_step`` the frame is stale
        contributor : who sends it, for ``gate.explain()`` and ``gate.stale``
        Returns False where it was stale and dropped. Raises InputError; nothing is applied then.
        """
        self._check_ready()
        check_gradients(gradients)
        step = None if local_step is None else whole("local_step", local_step)
        frame = one_frame(gradients, self.config.sizes, step, contributor_of(contributor))
        return self._take_in(frame, learning_rates)

    def recv_activations(self, features: Any, weights: Any = None) -> tuple[Any, DeduplicationData]:
        """What a model sees of a batch: activations nested like ``features``, and what ``send_gradients`` needs.

        features : ids nested like the configuration's features; weights : the same, or None (docs/activations.md)
        """
        return self._exchange.recv(features, weights)

    def send_gradients(
        self, gradients: Any, learning_rates: Given = None, deduplication_data: DeduplicationData | None = None
    ) -> bool:
        """The gradients of activations, float32, nested like the features, as one frame; None at a leaf is zeros.

        Returns False where the gate found it stale. Mirrors XlaSendTPUEmbeddingGradients (docs/activations.md).
        """
        return self._exchange.send(gradients, learning_rates, deduplication_data)

    @between_steps
    def warmup(self) -> int:
        """Compile every program that steps, lookups and checkpoints will ask for; returns how many there are.

        Without it each is compiled when first needed, which on a TPU takes seconds. Nothing is applied.
        """
        return self._state.warm()

    def flush(self) -> bool:
        """Open the gate for what it holds, with the rates of the last run or apply. False where it holds nothing."""
        self._check_ready()
        return self._flush(self._counters)

    # ---- state out and in

    @property
    def gate(self) -> FrameGate:
        return self._gate

    @property
    def global_step(self) -> int:
        """How often the gate has opened."""
        return self.gate.global_step

    @between_steps
    def table(self, name: str) -> jax.Array:
        """A copy of the weights in id order, (vocabulary_size, dim); row-sharded where the mesh divides it."""
        return self._state.table(name).whole()

    @between_steps
    def slots(self, name: str) -> dict[str, jax.Array]:
        """Copies of the optimizer's slots in id order, by TensorFlow's names."""
        table = self._state.table(name)
        return {slot: table.whole(part) for slot, part in self._state.parts(name).items() if part}

    @between_steps
    def lookup(self, name: str, ids: Any, forward: bool = False) -> Float32:
        """The weights of some ids, repeats allowed: float32 (n, dim). The cheap way to see rows.

        forward : as a forward pass sees them, through the table's simulated quantization where it has one
        """
        return self._state.lookup(name, ids, forward)

    @between_steps
    def retrieve_parameters(self, name: str) -> dict[str, Float32]:
        """Weights ("parameters") and every slot as numpy in id order: TensorFlow's RetrieveTPUEmbedding…Parameters."""
        return self._state.retrieve(name)

    def load_parameters(self, name: str, rows: Any, *, ids: Any = None, **slots: Any) -> None:
        """Set weights, then every slot by its name: TensorFlow's LoadTPUEmbedding…Parameters.

        rows and each slot : (vocabulary_size, dim) in id order, or with ``ids`` (n, dim) for those ids only
        """
        self._check_whole()
        where, values = self._state.checked(name, rows, ids, slots)
        with self.gate.still(), self._whole():
            self._before_any_change()
            for part, value in values.items():
                self._state.table(name).write(where, value, part)
            for watcher in self._watchers:
                watcher.loaded(name, where)

    @between_steps
    def state_hash(self) -> str:
        """SHA-256 (hex) of all tables, slots and the global step; the same state gives the same hash on any mesh.

        Over each table by name: the name and a zero byte, vocabulary_size and dim (int64), the weights, then
        each slot in slot order, rows in id order, little-endian float32 (weights of 16 bits as such); at the end the
        global step (int64).
        """
        return self._state.hash(self.global_step)

    @between_steps
    def write_tables(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write ``<table>.parquet`` for every table: id, row, one column per slot, in id order."""
        return self._state.write(place("directory", directory))

    @between_steps
    def read_tables(self, directory: str | os.PathLike[str]) -> None:
        """Start from what ``write_tables`` wrote: every row listed is set, the others stay as they are.

        A slot that has no column keeps its value, so that weights from elsewhere can be taken up. Raises InputError:
        where a file is missing or has other columns nothing has changed; after a bad row inside one make a new engine.
        """
        read = self._state.reading(place("directory", directory))
        with self._whole():
            self._before_any_change()
            read()
            for watcher in self._watchers:
                for name in self.config.table_names:
                    watcher.loaded(name)

    @between_steps
    def save(self, path: str | os.PathLike[str]) -> None:
        """Commit everything to a checkpoint folder: tables, slots, gate, step, and the position of the last run."""
        self._saves.save(path)

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        mesh: jax.sharding.Mesh | None = None,
        threads: int | None = None,
        *,
        config: EmbeddingConfig | None = None,
        num_required: int | None = None,
        reduction: str | None = None,
    ) -> Engine:
        """An engine as it was at the last commit of a checkpoint folder, on any mesh.

        config : None: the one that was saved; else its tables must have the same names, dims and optimizers, and
            at least as many rows: new rows start as they would
        num_required, reduction : None: as saved; else they must be the same
        """
        return restore(cls, path, config, mesh, threads, num_required, reduction)

    @property
    def processes(self) -> tuple[ProcessReport, ...]:
        """Of a job of several, by rank, what each did by itself; else none."""
        return ()

    # ---- inside; what an engine of several processes does otherwise comes first

    def _make_state(self, mesh: jax.sharding.Mesh | None, threads: int) -> State:
        return State(self.config, mesh, self.seed, threads)

    def _make_saves(self) -> Saves:
        return Saves(self)

    def _make_deltas(self, **arguments: Unpack[DeltaArguments]) -> Deltas:
        return Deltas(self, **arguments)

    def _reader(self, source: Any, options: ReadOptions) -> FrameReader:
        return FrameReader(source, options)

    @between_steps
    def _seen(self, ids: Mapping[str, Any]) -> tuple[dict[str, Float32], int]:
        """Rows by table as a forward pass sees them, and the step they are of."""
        return {name: self._state.lookup(name, of, True) for name, of in ids.items()}, self.global_step

    def _take_in(self, frame: Frame, learning_rates: Given) -> bool:
        """One frame from memory. False where it was stale."""
        self._check_ready()
        rates = self._own_rates
        if learning_rates is not None:
            rates = LearningRates(self.config.num_tags, learning_rates, self.config.schedules)
        self._rates = rates.complete()
        return self._push(frame, rates, self._counters)[1]

    def _step(self, coalesced: Mapping[str, list[Coalesced]], rates: tuple[float, ...]) -> None:
        step = self._gate.global_step
        watchers = list(self._watchers) if self._watchers else ()
        if self._saves.follows_steps:
            with self.watch.saving():
                self._saves.before_step(coalesced)
        for watcher in watchers:
            watcher.before_change()
        self.watch.step(coalesced, lambda: self._state.apply(coalesced, rates, step))
        if self._state.touches(coalesced):
            self._changed_step = step + 1
        for watcher in watchers:
            watcher.stepped(coalesced)
        self._last_rates = rates

    def _before_any_change(self) -> None:
        """Rows are about to be set from outside. Under the gate's lock."""
        self._saves.before_any_change()
        for watcher in self._watchers:
            watcher.before_change()

    @contextmanager
    def _whole(self, began: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """All or failed: what is cut short in here leaves tables that are of no step, and the engine says so.

        began : whether anything was changed; if not, an error leaves everything as it was
        """
        try:
            yield
        except BaseException as error:
            if began():
                self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._failed = f"{type(error).__name__}: {error}"

    def _begin(self, rates: LearningRates) -> tuple[Begin, Callable[[], bool]]:
        """What the pipeline asks before it changes anything, and whether it has asked."""
        began = False

        # Under the gate's lock: another thread's step may have failed, and the rates are for this very step.
        def begin(frame: Frame, opens: bool) -> tuple[float, ...]:
            nonlocal began
            self._check_ready()
            resolved = rates.at(self.global_step, frame.learning_rates) if opens else ()
            began = True
            return resolved

        return begin, lambda: began

    def _push(self, frame: Frame, rates: LearningRates, counters: Counters) -> tuple[Frame, bool]:
        """Returns the frame as it was taken in, rows that are bad left out, and whether it was: else it was stale."""
        begin, began = self._begin(rates)
        try:
            return self._saves.known(counters, lambda: self._pipeline.push(frame, begin, counters))
        except BadRowsError:
            pass
        except BaseException as error:
            if began():
                self._fail(error)
            raise
        return self._push(frame.audited(), rates, counters)

    def _flush(self, counters: Counters) -> bool:
        begin, began = self._begin(self._rates)
        with self._whole(began):
            return self._pipeline.flush(begin, counters)

    @between_steps
    def _wait(self) -> None:
        with self._whole():
            self._state.wait()

    def _check_whole(self) -> None:
        if self._failed is not None:
            raise StateError(f"an earlier step failed half way ({self._failed}); make a new engine from saved tables")

    def _check_ready(self) -> None:
        if self._failed is not None:
            self._check_whole()
        if self.config.mode == "INFERENCE":
            raise ConfigError("the configuration's mode is INFERENCE, which refuses updates; use TRAINING")

    @between_steps
    def _start_counting(self) -> None:
        for store in self._pipeline.stores.values():
            store.start_counting()
