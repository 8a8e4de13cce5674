"""The Engine: the core with checkpoints, telemetry, deltas and activations. Only creating one loads jax."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from penstock.accumulators.frame_gate import FrameGate
from penstock.accumulators.gradient_checks import contributor_of
from penstock.activations.exchange import Exchange
from penstock.checkpoint.engine_state import restore
from penstock.checkpoint.session import CheckpointSession
from penstock.config.embedding import EmbeddingConfig
from penstock.core import checked_reduction
from penstock.deltas import DeltaOptions, Deltas, check_no_deltas
from penstock.errors import listed
from penstock.frames import Contributor, time_given
from penstock.io.decoding.frame_from_arrays import one_frame
from penstock.learning_rates import Rates
from penstock.lockstep import create_core, sharing_errors
from penstock.options import RUN, AnyPath, RunKeywords, StageKeywords, with_defaults, with_keywords
from penstock.run import RunOptions, SourceRun
from penstock.stats import Report
from penstock.table_access import ActivationAccess, TableAccess
from penstock.tables.table_programs import Variant
from penstock.tables.table_set import TableSet
from penstock.telemetry import Telemetry
from penstock.threads import num_threads
from penstock.validation import whole

if TYPE_CHECKING:
    import jax
    import pyarrow as pa


class Engine(TableAccess, ActivationAccess):
    """Applies sparse gradients to embedding tables, as TensorFlow's TPU embedding would.

    config : the tables and their optimizers
    mesh : a ``jax.sharding.Mesh`` that the rows of every table are sharded over, also over the processes of a job
        (docs/meshes.md); None: all local devices
    num_required : frames that open the gate; None: the configuration's, else 1
    reduction : "mean" divides each row's sum by the number of frames that contain the row, "sum" does not; None: the
        configuration's, else "mean"
    seed : of the random initial values; threads : of the host, and of CPU devices; None: all CPUs of this process
    share : (rank, count): only the rows of one of ``count`` shares; every frame is reduced to them (docs/shares.md)
    variant : of the programs that update rows, or table → variant (docs/tpu.md); PENSTOCK_VARIANT takes precedence

    Thread-safe: frames enter in the order in which they get the gate's lock; tables are read and written between steps.

    gate : counts the frames; producers may push to it
    commits_alone : whether an engine with a share of the rows commits them itself; else a job does
    """

    commits_alone = False

    def __init__(
        self,
        config: EmbeddingConfig,
        mesh: jax.sharding.Mesh | None = None,
        num_required: int | None = None,
        reduction: str | None = None,
        seed: int = 0,
        threads: int | None = None,
        share: tuple[int, int] | None = None,
        variant: Variant = "auto",
    ) -> None:
        self.reduction = checked_reduction(config, mesh, reduction)
        self.config, self.seed = config, whole("seed", seed)
        num_required = None if num_required is None else whole("num_required", num_required, 1)
        tables = TableSet(config, mesh, self.seed, num_threads(threads), share, variant)
        self.core = create_core(config, tables, num_required, self.reduction, self.seed, threads)
        # The first observer is the innermost: telemetry times the step alone.
        self.watch = Telemetry(lambda name, numbers: tables.table(name).read(numbers), known_as=tables.ids)
        self.core.observe(self.watch)
        in_job = share is not None and not self.commits_alone
        self.session = CheckpointSession(self.core, partial(self.watch.timed, "save"), in_job)
        self.core.observe(self.session)
        self.gate = FrameGate(self.core.gate, self.apply)
        from penstock.bridge.tracing import is_staging  # here, because it loads jax

        self._exchange = Exchange(config, self._looked_up, self.core.take_in, self.core.gate, is_staging)

    def __repr__(self) -> str:
        devices = self.core.tables.devices
        kinds = listed(sorted({device.platform for device in devices}))
        return f"Engine(tables: {listed(self.config.table_names)}; step {self.global_step}; {len(devices)} {kinds})"

    # ---- gradients in

    @with_keywords("run", *RUN)
    def run(self, source: Any, **keywords: Unpack[RunKeywords]) -> Report:
        """Apply a source of gradients, frame by frame, to its end.

        source : a path, a directory, "-", a URI, anything with ``__arrow_c_stream__``, a pyarrow dataset or scanner, a
            polars LazyFrame, a binary file, an iterator of record batches, or a list of sources; also a topic
            (docs/brokers.md) or a table with versions (docs/lakehouse.md)
        {options}

        Raises InputError or ConfigError; the frames before the bad one stay applied, that frame and the rest are not.
        Frames still in the gate at the end stay there for the next run and count as ``pending``. While other threads
        push, the report counts this source's frames and steps; its tables count all that entered since the run began.
        """
        values = with_defaults("Engine.run", "run", RUN, keywords)
        options = RunOptions.among(values)
        with sharing_errors(self.core):
            if values["deltas"] is None:
                check_no_deltas(keywords)
                return self._source_run(source, options).run()
            deltas = Deltas(self.core, DeltaOptions.among(values))
            return self._source_run(source, options, deltas).run_into(values["deltas"])

    @with_keywords("stage", *RUN)
    def stage(self, source: Any, **keywords: Unpack[StageKeywords]) -> pa.RecordBatchReader:
        """Apply a source as ``run`` does, and return the rows that change as an Arrow stream (docs/deltas.md).

        Every option means the same as in ``run``; deltas are not numbered unless ``numbered``. The stream reads no
        further than the requested batch needs. Dropping the reader ends the run after a whole frame. The request that
        meets an error raises it.

        {options}
        """
        values = with_defaults("Engine.stage", "stage", RUN, keywords)
        deltas = Deltas(self.core, DeltaOptions.among(values))
        return self._source_run(source, RunOptions.among(values), deltas).reader()

    def apply(
        self,
        gradients: Mapping[str, tuple[Any, Any]],
        local_step: int | None = None,
        learning_rates: Rates = None,
        contributor: Contributor = None,
        time: int | None = None,
    ) -> bool:
        """Apply one frame given as arrays, as ``engine.gate.push`` does.

        gradients : table → (ids, gradients): integers (n,), floats (n, dim); numpy, jax or Arrow arrays
        local_step : the producer's step; if it is behind ``global_step``, the frame is stale
        contributor : the producer, for ``gate.explain()`` and ``gate.stale``
        time : of the frame, in seconds, for tables with the clock "time", which need it
        Returns False if the frame was stale and dropped. Raises InputError; nothing is applied then.
        """
        with sharing_errors(self.core):
            self.core.check_ready()
            step = None if local_step is None else whole("local_step", local_step)
            seconds = time_given(time, self.config.needs_time, "apply()")
            frame = one_frame(gradients, self.config.id_ranges, step, contributor_of(contributor), time=seconds)
            return self.core.take_in(frame, learning_rates)

    def flush(self) -> bool:
        """Open the gate for the buffered frames, with the rates of the last run or apply. Returns False if empty."""
        return self.core.open_early(self.core.rates, self.core.counters)

    # ---- state out and in

    def save(self, path: AnyPath) -> None:
        """Commit everything to a checkpoint folder: tables, slots, gate, step, position of the last run."""
        with self.core.still():
            self.session.save(path)

    @classmethod
    def restore(
        cls,
        path: AnyPath,
        mesh: jax.sharding.Mesh | None = None,
        threads: int | None = None,
        *,
        config: EmbeddingConfig | None = None,
        num_required: int | None = None,
        reduction: str | None = None,
        share: tuple[int, int] | None = None,
    ) -> Engine:
        """Return an engine in the state of the last commit of a checkpoint folder, on any mesh.

        config : None: the saved one; else its tables must have the same names, dims and optimizers, and at least as
            many rows: new rows get their initial values
        num_required, reduction : None: as saved; else they must be the same
        share : (rank, count): only a share of the rows, whatever the number of shares that made the commit
        """
        return restore(cls, path, config, mesh, threads, num_required, reduction, share)

    # ---- internal

    def _source_run(self, source: Any, options: RunOptions, deltas: Deltas | None = None) -> SourceRun:
        return SourceRun(self.core, self.session, self.watch, self.gate, source, options, deltas)
