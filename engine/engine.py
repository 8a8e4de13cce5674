"""The Engine: tables on devices, and the one way from a source of gradients to them.

The composition root of the library: it joins reader, pipeline and bridge, and holds what belongs to
none of them (configuration, global step, whether a step failed half way). jax is loaded when an
Engine is made, not before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.activations.deduplication import DeduplicationData
from penstock.activations.exchange import Exchange
from penstock.arguments import whole
from penstock.between_steps import between_steps, checked_reduction
from penstock.checkpoint.contents import restore
from penstock.checkpoint.saver import KEEP
from penstock.checkpoint.saves import Saves
from penstock.config.embedding import EmbeddingConfig
from penstock.crew import num_threads
from penstock.errors import ConfigError, StateError, UsageError
from penstock.frames import Coalesced, Frame
from penstock.gate import Gate
from penstock.io.arrays import one_frame
from penstock.io.quarantine import parse_on_bad_row
from penstock.io.reader import FrameReader, ReadOptions
from penstock.pipeline import BadRowsError, Begin, FrameGate, Pipeline
from penstock.rates import Given, LearningRates
from penstock.state import State
from penstock.stats import Contributor, Counters, Report, TableReport
from penstock.store import TableStore

if TYPE_CHECKING:
    import jax

Float32 = npt.NDArray[np.float32]
Progress = Callable[[Counters, Gate, float | None], None]


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
        self._rates = LearningRates(config.num_tags, None, config.schedules)
        self._last_rates: tuple[float, ...] | None = None
        self._state = State(config, mesh, self.seed, num_threads(threads))
        self._counters = Counters()  # of apply and flush, which report nothing
        self._saves = Saves(self)
        required = config.gate_num_required or 1 if num_required is None else whole("num_required", num_required, 1)
        gate = FrameGate(required, self.apply)
        stores = {
            spec.name: TableStore(spec.vocabulary_size, spec.dim, accumulate=spec.accumulate, mean=reduction == "mean")
            for spec in config.tables
        }
        self._gate = gate
        self._pipeline = Pipeline(gate, stores, self._step, threads)
        self._exchange = Exchange(config, self._seen, self._take_in, gate)

    # ---- gradients in

    def run(
        self,
        source: Any,
        *,
        table: str | None = None,
        columns: Mapping[str, str] | None = None,
        contribution_rows: int | None = None,
        merge: str | None = None,
        learning_rates: Given = None,
        on_bad_row: str = "error",
        flush: bool = False,
        limit: int | None = None,
        gradient_dtype: str | None = None,
        allow_missing_end: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | None = None,
        keep: int = KEEP,
        resume: bool = False,
        progress: Progress | None = None,
        shield: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Report:
        """Apply a source of gradients, frame by frame.

        source : a path, a directory, "-", a URI, anything with ``__arrow_c_stream__``, a binary file, an
            iterator of record batches, or a list of paths
        table : of rows that do not say theirs
        columns : role → name, where the stream's columns have other names
        contribution_rows : cut frames of that many rows, where batches mean nothing and there is no step
        merge : "step" merges sorted sources by step, "round" takes a frame of each source in turn
        learning_rates : by tag, a mapping or a sequence; before the column and the schedules
        on_bad_row : "error" stops before the frame; "drop" leaves the row out and counts it; "quarantine=FILE" also
            puts it into an Arrow file, whole when this returns or raises (docs/bad_rows.md)
        flush : open the gate once more at the end
        limit : stop after that many frames, those left out by ``resume`` included
        checkpoint : a folder in which to commit the state with its position: after every ``every`` steps, in the
            background, and at the end, whatever ended the run; the last ``keep`` commits stay
        resume : leave out the frames that this engine's state holds already (``Engine.restore``)
        progress : called after every frame with the counters, the gate and the share of input read
        shield : a context manager held while a frame is applied (the command line holds signals back)

        Raises InputError or ConfigError; the frames before the bad one stay applied, it and the
        rest are not. What the gate holds at the end stays for the next run, counted as ``pending``.
        Where other threads push at the same time, the report counts this source's frames and the steps that they
        opened; what it says of tables counts everything that entered since the run began.
        """
        self._check_ready()
        limit = None if limit is None else whole("limit", limit, 0)
        rates = LearningRates(self.config.num_tags, learning_rates, self.config.schedules)
        mode, quarantine = parse_on_bad_row(on_bad_row)
        options = ReadOptions(
            sizes=self.config.sizes,
            features=self.config.features,
            num_tags=self.config.num_tags,
            rates_needed=rates.missing,
            table=table,
            columns=columns or {},
            contribution_rows=contribution_rows,
            merge=merge,
            on_bad_row=mode,
            gradient_dtype=gradient_dtype,
            allow_missing_end=allow_missing_end,
            unseen=True,
        )
        started = time.perf_counter()
        counters = self._start_counting()
        reader = FrameReader(source, options)
        self._rates = rates
        with self._saves.run(reader, counters, shield, checkpoint, every, keep, resume, quarantine) as saving:
            for frame in saving.frames(limit):
                with shield():
                    frame, _ = self._push(frame, rates, counters)
                    saving.took(frame)
                if progress is not None:
                    progress(counters, self.gate, reader.fraction())
            if flush:
                with shield():
                    self._flush(counters)
        self._wait()
        return self._report(counters, time.perf_counter() - started, reader, saving.skipped)

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
        if not isinstance(gradients, Mapping) or not all(isinstance(g, tuple | list) for g in gradients.values()):
            raise UsageError(f"gradients: expected a mapping table → (ids, gradients), got {type(gradients).__name__}")
        local_step = None if local_step is None else whole("local_step", local_step)
        return self._take_in(one_frame(gradients, self.config.sizes, local_step, contributor), learning_rates)

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
            self._saves.before_any_change()
            for part, value in values.items():
                self._state.table(name).write(where, value, part)

    @between_steps
    def state_hash(self) -> str:
        """SHA-256 (hex) of all tables, slots and the global step; the same state gives the same hash on any mesh.

        Over each table by name: the name and a zero byte, vocabulary_size and dim (int64), the weights, then
        each slot in slot order, rows in id order, little-endian float32; at the end the global step (int64).
        """
        return self._state.hash(self.global_step)

    @between_steps
    def write_tables(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write ``<table>.parquet`` for every table: id, row, one column per slot, in id order."""
        return self._state.write(directory)

    @between_steps
    def read_tables(self, directory: str | os.PathLike[str]) -> None:
        """Start from what ``write_tables`` wrote: every row listed is set, the others stay as they are.

        A slot that has no column keeps its value, so that weights from elsewhere can be taken up.
        """
        with self._whole():
            self._saves.before_any_change()
            self._state.read(directory)

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

    # ---- inside

    @between_steps
    def _seen(self, ids: Mapping[str, Any]) -> tuple[dict[str, Float32], int]:
        """Rows by table as a forward pass sees them, and the step they are of."""
        return {name: self._state.lookup(name, of, True) for name, of in ids.items()}, self.global_step

    def _take_in(self, frame: Frame, learning_rates: Given) -> bool:
        """One frame from memory. False where it was stale."""
        self._check_ready()
        self._rates = rates = LearningRates(self.config.num_tags, learning_rates, self.config.schedules).complete()
        return self._push(frame, rates, self._counters)[1]

    def _step(self, coalesced: Mapping[str, list[Coalesced]], rates: tuple[float, ...]) -> None:
        self._saves.before_step(coalesced)
        self._state.apply(coalesced, rates)
        self._last_rates = rates

    @contextmanager
    def _whole(self, began: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """All or failed: what is cut short in here leaves tables that are of no step, and the engine says so.

        began : whether anything was changed; if not, an error leaves everything as it was
        """
        try:
            yield
        except BaseException as error:
            if began():
                self._failed = f"{type(error).__name__}: {error}"
            raise

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
        with self._whole(began), suppress(BadRowsError):
            return self._pipeline.push(frame, begin, counters)
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
        self._check_whole()
        if self.config.mode == "INFERENCE":
            raise ConfigError("the configuration's mode is INFERENCE, which refuses updates; use TRAINING")

    @between_steps
    def _start_counting(self) -> Counters:
        for store in self._pipeline.stores.values():
            store.start_counting()
        return Counters()

    @between_steps
    def _report(self, counters: Counters, seconds: float, reader: FrameReader, skipped: int) -> Report:
        tables = {n: TableReport(s.num_rows, s.num_distinct) for n, s in self._pipeline.stores.items()}
        return counters.report(
            seconds,
            pending=self.gate.num_accumulated,
            global_step=self.global_step,
            verified=reader.verified,
            tables=tables,
            learning_rates=self._last_rates if self.config.num_tags else None,
            notes=counters.notes(reader.first_bad),
            skipped=skipped,
        )
