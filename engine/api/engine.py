"""The Engine: the core with checkpoints, telemetry, deltas and activations. Only tables on devices load jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.api.activations.deduplication import DeduplicationData
from penstock.api.activations.exchange import Exchange
from penstock.api.deltas import Deltas, check_no_deltas
from penstock.api.live_reads import LiveReads
from penstock.api.run import SourceRun
from penstock.api.table_access import TableAccess
from penstock.base.errors import UsageTypeError, listed
from penstock.base.html_tables import html_table
from penstock.base.threads import ThreadTeam
from penstock.base.validation import whole
from penstock.checkpoint.restoration import RestoreOptions, restore
from penstock.checkpoint.session import CheckpointSession
from penstock.core.core_creation import checked_reduction, create_core
from penstock.core.frame_gate import FrameGate
from penstock.core.gradient_checks import contributor_of
from penstock.core.observers import Context
from penstock.core.telemetry import Telemetry
from penstock.io.decoding.frame_from_arrays import one_frame
from penstock.model.command_options import RunOptions, StageOptions
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.frames import Contributor, time_given
from penstock.model.frozen_tables import check_no_until_step
from penstock.model.gate_policy import GatePolicy
from penstock.model.keywords import with_options
from penstock.model.learning_rates import Rates
from penstock.model.options import AnyPath
from penstock.model.stats import Report
from penstock.rows.shared.folder import SharedFolder
from penstock.rows.table_programs import Variant
from penstock.rows.table_set import TableSet

if TYPE_CHECKING:
    import jax
    import pyarrow as pa


class Engine(TableAccess):
    """Applies sparse gradients to embedding tables, as TensorFlow's TPU embedding would.

    Parameters
    ----------
    config : EmbeddingConfig
        The tables and their optimizers.
    mesh : jax.sharding.Mesh or None
        The rows of every table are sharded over it, also over the processes of a job (docs/scaling.md). None: the
        accelerators that jax finds in this process, else the host (docs/devices.md).
    num_required : int or None
        Frames that open the gate, at least 1. None: the configuration's, else 1.
    reduction : {"mean", "sum"} or None
        "mean" divides each row's sum by the number of frames that contain the row, "sum" does not. None: the
        configuration's, else "mean".
    seed : int
        Seed of the random initial values.
    threads : int or None
        Threads of the host, and of CPU devices. None: all CPUs of this process, by affinity and the quota of its
        container. Results do not depend on it.
    share : (int, int) or None
        (rank, count): only the rows of one of ``count`` shares; every frame is reduced to them (docs/scaling.md).
    variant : str or mapping of str to str
        Programs that update rows, or table → variant (docs/devices.md); PENSTOCK_VARIANT takes precedence.
    shared : str, path or None
        A folder of this machine, best in memory (/dev/shm): tables on the host lie in files there, which other
        processes read with ``Reader`` (docs/readers.md). None: in memory of this process.
    workers : int, sequence of str or None
        In place of ``num_required``, rounds (docs/explanation/gates.md): a step takes one frame of each worker, summed
        in their order. A number N for the contributors "rank-0" to "rank-(N-1)" or 0 to N - 1, or their names. None:
        the configuration's rounds, if it has any.
    max_staleness : int or None
        How many steps a frame may be behind, at least 0. None: the configuration's, else 0, as in TensorFlow.

    Attributes
    ----------
    gate : FrameGate
        Counts the frames; producers may push to it.
    commits_alone : bool
        Whether an engine with a share of the rows commits them itself; else a job does.

    Raises
    ------
    ConfigError
        If the configuration cannot run.
    MemoryError
        If tables on CPU devices exceed the memory of this machine.
    UsageError
        If an argument is out of range.

    Notes
    -----
    Thread-safe: frames enter in the order in which they get the gate's lock; tables are read and written between steps.

    Examples
    --------
    >>> import numpy as np
    >>> import penstock as ps
    >>> table = ps.TableConfig(100_000, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), num_required=2)
    >>> for worker in range(2):  # two frames make a step; repeated ids are summed
    ...     applied = engine.apply({"user": (np.array([7, 41, 7]), np.ones((3, 2), np.float32))}, local_step=0)
    >>> engine.global_step
    1
    >>> engine.lookup("user", [7, 41])
    array([[0.8, 0.8],
           [0.9, 0.9]], dtype=float32)
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
        shared: AnyPath | SharedFolder | None = None,
        workers: int | Sequence[str] | None = None,
        max_staleness: int | None = None,
    ) -> None:
        self.reduction = checked_reduction(config, mesh, reduction)
        self.seed = whole("seed", seed)
        policy = GatePolicy.of(config.gate_policy, num_required, workers, max_staleness)
        team = ThreadTeam(threads)
        if shared is not None:
            check_no_until_step(config.tables, "an engine whose rows other processes read (--shared, shared=)")
        self._folder = shared if isinstance(shared, SharedFolder) or shared is None else SharedFolder(shared)
        allocate = None if self._folder is None else self._folder.allocate
        tables = TableSet(config, mesh, self.seed, team, share, variant, allocate)
        self.core = create_core(config, tables, policy, self.reduction, self.seed, team)
        # The first observer is the innermost: telemetry times the step alone.
        self.watch = Telemetry(tables)
        self.core.observe(self.watch)
        if self.core.norms is not None:
            self.watch.look_closer()  # at the norms of updates
        in_job = share is not None and not self.commits_alone
        self._reads: LiveReads | None = None
        self.session = CheckpointSession(
            self.core, partial(self.watch.timed, "save"), self.watch.counters, in_job, self._durable
        )
        self.core.observe(self.session)
        self.gate = FrameGate(self.core)
        self._exchange = Exchange(config, self.core)
        if self._folder is not shared:
            self.publish()  # a caller that opened the folder does so once all rows are set

    @property
    def config(self) -> EmbeddingConfig:
        """The configuration, as a new engine takes it."""
        return self.core.config.at_step(0)

    def __repr__(self) -> str:
        devices = self.core.tables.devices
        kinds = listed(sorted({device.platform for device in devices}))
        return f"Engine(tables: {listed(self.config.table_names)}; step {self.global_step}; {len(devices)} {kinds})"

    def _repr_html_(self) -> str:
        """Return two tables for notebooks: the state of the gate, and the configuration."""
        gate = self.gate
        values = (gate.global_step, gate.num_accumulated, gate.num_required, self.core.tables.programs.variants)
        head = ("Engine: step", "frames in the gate", "required", "variants")
        return html_table(head, [values]) + self.config._repr_html_()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageTypeError(
            f"cannot pickle or copy {self!r}: Engine.save writes it, Engine.restore reads it, also in another process; "
            "penstock serve shares one with other processes"
        )

    # ---- readers without the lock

    @property
    def reads(self) -> LiveReads:
        """Lookups of tables on the host that wait for no step; from the first use on, steps mark what they write.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> rows = engine.reads.lookup({"user": [5, 3]}, consistent=True)
        >>> rows["user"].tolist(), rows.version.step
        ([[1.0, 1.0], [1.0, 1.0]], 0)
        """
        if self._reads is None:
            self.publish()
        assert self._reads is not None
        return self._reads

    def publish(self) -> None:
        """Make ``reads`` ready; with ``shared``, show the rows to other processes.

        Notes
        -----
        An engine does so itself: with ``shared`` when its rows are set, else at the first use of ``reads``. Only one
        whose ``shared`` is a folder that the caller has opened waits for this call.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), shared="shared")
        >>> ps.Reader("shared").lookup("user", [5]).tolist()
        [[1.0, 1.0]]
        """
        with self.core.reading():
            if self._reads is None:
                self._reads = LiveReads(self.core, self._folder, self.session)

    @property
    def is_shared(self) -> bool:
        """Whether other processes may read the rows of this engine."""
        return self._folder is not None

    # ---- gradients in

    @with_options(RunOptions)
    def run(self, options: RunOptions) -> Report:
        """Apply a source of gradients, frame by frame, to its end.

        Parameters
        ----------
        source : object
            A path, a directory, "-", a URI, anything with ``__arrow_c_stream__``, a pyarrow dataset or scanner, a
            polars LazyFrame, a binary file, an iterator of record batches, or a list of sources; also a topic
            or a table with versions (docs/sources.md).
        {options}

        Returns
        -------
        Report
            The counts of this run. Frames still in the gate at its end stay there for the next run and count as
            ``pending``.

        Raises
        ------
        InputError
            If the source is invalid. The frames before the bad one stay applied; that frame and the rest are not.
        ConfigError
            If the configuration cannot run the source, for example without a needed learning rate.
        UsageTypeError
            If a keyword is unknown; the message names the nearest one.

        Notes
        -----
        While other threads push, the report counts this source's frames and steps; its tables count all that entered
        since the run began.

        Examples
        --------
        >>> import penstock as ps
        >>> import pyarrow as pa
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> rows = {"step": [0, 0, 1], "id": [5, 5, 3], "gradient": [[1.0, 2.0], [1.0, 2.0], [4.0, 4.0]]}
        >>> report = engine.run(pa.table(rows))
        >>> report.rows, report.frames, report.steps
        (3, 2, 2)
        >>> engine.lookup("user", [5, 3])
        array([[0.8, 0.6],
               [0.6, 0.6]], dtype=float32)
        """
        with self.core.sharing_errors():
            if options.deltas is None:
                check_no_deltas(options)
                return self._source_run(options, None).run()
            return self._source_run(options, Deltas(self.core, options), options.deltas).run()

    @with_options(StageOptions)
    def stage(self, options: StageOptions) -> pa.RecordBatchReader:
        """Apply a source as ``run`` does, and return the rows that change as an Arrow stream (docs/deltas.md).

        Parameters
        ----------
        source : object
            As for ``run``.
        {options}

        Returns
        -------
        pyarrow.RecordBatchReader
            The deltas: ``table``, ``step``, ``id``, ``row`` and the requested slots; ids ascend within a step and a
            table. The stream reads no further than the requested batch needs. Dropping the reader ends the run after a
            whole frame.

        Raises
        ------
        InputError
            If the source is invalid; the request that meets the error raises it.
        UsageError
            If an option is out of range, or no table has a requested slot.

        Notes
        -----
        Every option means the same as in ``run``; deltas are not numbered unless ``numbered``. ``close`` of the reader,
        which is pyarrow's, has no effect.

        Steps of other threads between two requests are in the next delta, which describes a single moment: if another
        thread steps while a delta of several batches is returned, the rest of it is read into memory first. At the end,
        what other threads changed during the last delta is one more delta; later changes are in none, and not
        committed. Rows that ``load_parameters`` and ``read_tables`` set are in the next delta or, if no step follows,
        in a final one, whose number equals its parent's.

        ``save`` in the middle of a stage saves state whose latest deltas may not have been delivered; of numbered
        deltas, the first ``parent`` after a restart shows it.

        Examples
        --------
        >>> import penstock as ps
        >>> import pyarrow as pa
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> rows = {"step": [0, 0, 1], "id": [5, 3, 5], "gradient": [[1.0, 2.0], [1.0, 2.0], [4.0, 4.0]]}
        >>> for batch in engine.stage(pa.table(rows)):
        ...     print(batch["step"].to_pylist(), batch["id"].to_pylist(), batch["row"].to_pylist())
        [1, 1] [3, 5] [[0.75, 0.5], [0.75, 0.5]]
        [2] [5] [[-0.25, -0.5]]
        """
        return self._source_run(options, Deltas(self.core, options)).reader()

    def apply(
        self,
        gradients: Mapping[str, tuple[Any, Any]],
        *,
        local_step: int | None = None,
        learning_rates: Rates = None,
        contributor: Contributor = None,
        time: int | None = None,
    ) -> bool:
        """Apply one frame given as arrays, from any thread, also while the engine runs.

        Parameters
        ----------
        gradients : mapping of str to (ids, gradients)
            By table: integers, shape (n,), and floats, shape (n, dim); lists, or arrays of NumPy, jax, torch, Arrow,
            pandas, polars or TensorFlow.
        local_step : int or None
            The producer's step; if it is behind ``global_step``, the frame is stale. None: never stale.
        learning_rates : mapping of int to float, sequence of float or None
            By tag; take precedence over the schedules.
        contributor : str, int or None
            The producer, for ``gate.explain()`` and ``gate.stale``.
        time : int or None
            Time of the frame, in seconds: for tables with the clock "time", which need it, and for ages.

        Returns
        -------
        bool
            False if the frame was stale and dropped.

        Raises
        ------
        InputError
            If an id, a gradient or a shape is invalid; nothing is applied then.
        ConfigError
            If a dynamic learning rate has no value.
        UsageError
            If an argument is out of range.

        Notes
        -----
        Validation runs before the gate's lock is acquired. Admission, sums and the step run under the lock, so that the
        frames of all threads have one order.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.apply({"user": ([5, 3], [[1.0, 2.0], [4.0, 4.0]])}, local_step=0)
        True
        >>> engine.apply({"user": ([5], [[1.0, 2.0]])}, local_step=0)  # behind the engine's step
        False
        >>> engine.lookup("user", [5, 3])
        array([[0.9, 0.8],
               [0.6, 0.6]], dtype=float32)
        """
        with self.core.sharing_errors():
            step = None if local_step is None else whole("local_step", local_step)
            config = self.core.config
            seconds = time_given(time, config.needs_time, "apply()")
            frame = one_frame(gradients, config.id_ranges, step, contributor_of(contributor), seconds)
            return self.core.take_in(frame, learning_rates)

    def flush(self) -> bool:
        """Open the gate for the buffered frames, with the rates of the last run or apply.

        Returns
        -------
        bool
            False if the gate was empty.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), num_required=2)
        >>> engine.apply({"user": ([5], [[1.0, 2.0]])})
        True
        >>> engine.global_step, engine.flush(), engine.global_step
        (0, True, 1)
        """
        return bool(self.core.open_early(Context(self.core.rates, self.core.counters)).seconds)

    # ---- activations out, and their gradients in

    def recv_activations(self, features: Any, weights: Any = None) -> tuple[Any, DeduplicationData]:
        """Look up a batch: return its activations, and the data that ``send_gradients`` needs.

        Parameters
        ----------
        features : nested like the configuration's features
            The ids of each feature: lists, arrays, ragged or sparse values, or CooIds (docs/activations.md).
        weights : nested like ``features``, or None
            The weight of each id.

        Returns
        -------
        activations : nested like ``features``
            float32, the feature's input shape followed by dim.
        deduplication_data : DeduplicationData
            The lookups, for ``send_gradients``.

        Raises
        ------
        InputError
            If an id or a weight is invalid.
        UsageError
            If the structure or a shape does not match the configuration.
        ConfigError
            If the configuration has no features.

        References
        ----------
        TensorFlow's ``XlaRecvTPUEmbeddingActivations`` and ``XlaRecvTPUEmbeddingDeduplicationData``

        Examples
        --------
        >>> import numpy as np
        >>> import penstock as ps
        >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
        >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=3)
        >>> engine = ps.Engine(config)
        >>> activations, dedup = engine.recv_activations({"clicked": [[7, 3], [], [7]]})
        >>> activations["clicked"]
        array([[2., 2.],
               [0., 0.],
               [1., 1.]], dtype=float32)
        """
        with self.core.sharing_errors():
            return self._exchange.recv(features, weights)

    def send_gradients(
        self,
        gradients: Any,
        learning_rates: Rates = None,
        deduplication_data: DeduplicationData | None = None,
        time: int | None = None,
    ) -> bool:
        """Apply gradients of activations as one frame.

        Parameters
        ----------
        gradients : nested like the configuration's features
            float32, each of the shape of its activation; None at a leaf means zeros.
        learning_rates : mapping of int to float, sequence of float or None
            By tag; take precedence over the schedules.
        deduplication_data : DeduplicationData or None
            What ``recv_activations`` returned for this batch.
        time : int or None
            Time of the frame, in seconds: for tables with the clock "time", which need it, and for ages.

        Returns
        -------
        bool
            False if the frame was stale and dropped.

        Raises
        ------
        InputError
            If a gradient is not finite; nothing is applied then.
        ConfigError
            If a dynamic learning rate has no value.
        UsageError
            If the structure, a shape or a dtype does not match the activations.
        StateError
            If ``deduplication_data`` is missing or belongs to another configuration.

        References
        ----------
        TensorFlow's ``XlaSendTPUEmbeddingGradients``

        Examples
        --------
        >>> import numpy as np
        >>> import penstock as ps
        >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
        >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=3)
        >>> engine = ps.Engine(config)
        >>> activations, dedup = engine.recv_activations({"clicked": [[7, 3], [], [7]]})
        >>> engine.send_gradients({"clicked": np.ones((3, 2), np.float32)}, deduplication_data=dedup)
        True
        >>> engine.lookup("item", [7, 3])
        array([[0. , 0. ],
               [0.5, 0.5]], dtype=float32)
        """
        with self.core.sharing_errors():
            return self._exchange.send(gradients, learning_rates, deduplication_data, time)

    # ---- state out and in

    def save(self, path: AnyPath) -> None:
        """Commit everything to a checkpoint folder: tables, slots, gate, step, position of the last run.

        Parameters
        ----------
        path : str or path
            A folder or URI; it keeps its last commits.

        Raises
        ------
        UsageError
            If the folder holds other files, or another process, or a run of this engine, writes commits to it.
        OSError
            If the folder cannot be written; its last commit stays.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.apply({"user": ([5], [[1.0, 2.0]])})
        True
        >>> engine.save("checkpoint")
        >>> ps.Engine.restore("checkpoint").lookup("user", [5])
        array([[0.9, 0.8]], dtype=float32)
        """
        self.session.save(path)

    @classmethod
    @with_options(RestoreOptions)
    def restore(cls, options: RestoreOptions) -> Engine:
        """Return an engine in the state of a commit of a checkpoint folder, on any mesh.

        Parameters
        ----------
        path : str or path
            A folder or URI, for its last commit; or ``DIR@VERSION`` (docs/versions.md).
        mesh : jax.sharding.Mesh or None
            As for ``Engine``; need not be the mesh that made the commit.
        threads : int or None
            As for ``Engine``.
        config : EmbeddingConfig or None
            None: the saved one; else its tables must have the same names, dims and optimizers, and at least as many
            rows: new rows get their initial values. Other differences need one of the last options.
        num_required : int or None
            None: as saved; else it must be the same.
        reduction : {"mean", "sum"} or None
            None: as saved; else it must be the same.
        workers, max_staleness
            None: as saved; others only if the gate holds no frames.
        share : (int, int) or None
            (rank, count): only a share of the rows, whatever the number of shares that made the commit.
        version : str, int or None
            A tag, or the step of a commit. None: the last commit, or the version in ``path``.
        shared : str, path or None
            As for ``Engine``; readers get the restored rows.
        {options}

        Returns
        -------
        Engine

        Raises
        ------
        StateError
            If there is no commit, or it is corrupt or does not match the arguments; the message names the option for a
            table that does not fit.
        UsageError
            If two options change one table, or the configuration contradicts one.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.apply({"user": ([5], [[1.0, 2.0]])})
        True
        >>> engine.save("checkpoint")
        >>> restored = ps.Engine.restore("checkpoint")
        >>> restored.global_step, restored.state_hash() == engine.state_hash()
        (1, True)
        """
        shared = options.shared
        folder = shared if isinstance(shared, SharedFolder) or shared is None else SharedFolder(shared)
        engine = restore(cls if folder is None else partial(cls, shared=folder), options)
        if folder is not shared:
            engine.publish()
        return engine

    def tag(self, name: str, *, note: str = "", move: bool = False) -> None:
        """Give the last commit of this engine a name, which keeps it; commits nothing (docs/versions.md).

        Parameters
        ----------
        name, note, move
            As for ``penstock.tag``.

        Raises
        ------
        StateError
            If this engine has no commit: none was restored, saved or completed by a run.
        UsageError
            If the name is invalid, or a tag has it already.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.save("run1")
        >>> engine.tag("start")
        >>> ps.Engine.restore("run1", version="start").global_step
        0
        """
        self.session.tag(name, note, move)

    def rollback(self, version: str | int) -> int:
        """Step forward to the rows of an earlier commit of this engine's checkpoint (docs/versions.md).

        Parameters
        ----------
        version : str or int
            A tag, or the step of a commit.

        Returns
        -------
        int
            The global step, which is one more than before.

        Raises
        ------
        StateError
            If this engine has no commit, there is no such version, it is damaged, or its tables are others.
        UsageError
            If the version is neither a tag nor a step.

        Notes
        -----
        Weights, slots and keys become those of the commit. Frames in the gate are dropped and counted as
        ``rolled_back``; positions in sources stay. It is durable with the next commit.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.save("run1")
        >>> engine.tag("good")
        >>> engine.apply({"user": ([5], [[900.0, 900.0]])})
        True
        >>> engine.rollback("good"), engine.lookup("user", [5]).tolist()
        (2, [[1.0, 1.0]])
        """
        return self.session.roll_back(self.session.saved(version)).step

    # ---- internal

    def _durable(self, step: int) -> None:
        if self._reads is not None:
            self._reads.durable(step)

    def _source_run(self, options: StageOptions, deltas: Deltas | None, target: AnyPath | None = None) -> SourceRun:
        return SourceRun(self.core, self.session, self.watch, self.gate, options, deltas, target)
