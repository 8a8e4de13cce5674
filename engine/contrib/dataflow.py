"""An engine as a function over record batches, for distributed data-flow systems (docs/stages.md).

Spark, Ray, Dask, Daft and Beam pickle a function and call it on their workers. The functions here contain only a
configuration and arguments. They create their engine when they are called, on the worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.api.deltas import form_of
from penstock.base.validation import INT64_MAX, check_known
from penstock.model.command_options import StageOptions, options_of
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.options import DeltaOptions, GateOptions, InitialOptions, ThreadOptions

if TYPE_CHECKING:
    from penstock.api.engine import Engine


# Arguments of Engine, and ``init``, the initial tables (``Engine.read_tables``).
ENGINE_OPTIONS = options_of("stage", InitialOptions, GateOptions, ThreadOptions)
STAGE_OPTIONS = options_of("stage", StageOptions)


class StageFunction:
    """Gradients in, deltas out, with a new engine for each call. ``stage_fn`` returns one.

    Parameters
    ----------
    config : EmbeddingConfig, str or path
        A configuration, or the path of one that is read when the function is called.
    **arguments : object
        As for ``stage_fn``.

    Attributes
    ----------
    schema : pyarrow.Schema
        Schema of the deltas; reading it creates no engine.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
    >>> stage = ps.StageFunction(ps.EmbeddingConfig.from_tables([table]))
    >>> stage.schema.names
    ['table', 'step', 'id', 'row']
    """

    def __init__(self, config: EmbeddingConfig | str | os.PathLike[str], **arguments: Any) -> None:
        check_known(type(self).__name__, arguments, {**ENGINE_OPTIONS, **STAGE_OPTIONS})
        self._config = config
        self._of_engine = {name: value for name, value in arguments.items() if name in ENGINE_OPTIONS}
        self._of_stage = {name: value for name, value in arguments.items() if name in STAGE_OPTIONS}

    @property
    def schema(self) -> pa.Schema:
        return form_of(self._loaded().at_step(INT64_MAX).tables, DeltaOptions.among(self._of_stage)).schema

    def __call__(
        self, batches: Iterable[pa.RecordBatch] | pa.RecordBatch | pa.Table
    ) -> Iterator[pa.RecordBatch] | pa.Table:
        """Return the deltas of a source.

        Parameters
        ----------
        batches : pyarrow.RecordBatch, pyarrow.Table or iterable of pyarrow.RecordBatch
            Gradients.

        Returns
        -------
        pyarrow.Table or iterator of pyarrow.RecordBatch
            A table for a table or a single batch; for an iterable of batches, lazily, its batches.
        """
        if isinstance(batches, pa.RecordBatch | pa.Table):
            return self._get_engine().stage(batches, **self._of_stage).read_all()
        return self._deltas(batches)

    def _deltas(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from self._get_engine().stage(batches, **self._of_stage)

    def _loaded(self) -> EmbeddingConfig:
        return self._config if isinstance(self._config, EmbeddingConfig) else EmbeddingConfig.load(self._config)

    def _get_engine(self) -> Engine:
        from penstock.api.engine import Engine

        arguments = dict(self._of_engine)
        init = arguments.pop("init", None)
        engine = Engine(self._loaded(), **arguments)
        if init is not None:
            engine.read_tables(init, learning_rates=self._of_stage.get("learning_rates"))
        return engine


class BlockStage(StageFunction):
    """Gradients in, deltas out, block by block, with one engine for all calls: Ray's ``map_batches`` has one per actor.

    Parameters
    ----------
    config : EmbeddingConfig, str or path
        A configuration, or the path of one that is read when the function is called.
    **arguments : object
        As for ``stage_fn``.

    Notes
    -----
    The end of a block ends its last frame, as the end of a source does: pass blocks of whole frames.

    Examples
    --------
    >>> import penstock as ps
    >>> import pyarrow as pa
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
    >>> stage = ps.BlockStage(ps.EmbeddingConfig.from_tables([table]))
    >>> block = pa.table({"step": [0], "id": [5], "gradient": [[1.0, 2.0]]})
    >>> stage(block)["row"].to_pylist()
    [[0.75, 0.5]]
    >>> stage(block.set_column(0, "step", [[1]]))["row"].to_pylist()
    [[0.5, 0.0]]
    """

    _engine: Engine | None = None

    def _get_engine(self) -> Engine:
        if self._engine is None:
            self._engine = super()._get_engine()
        return self._engine

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_engine"}


def stage_fn(config: EmbeddingConfig | str | os.PathLike[str], **arguments: Any) -> StageFunction:
    """Return a picklable function from gradient batches to deltas, for Spark, Ray, Dask, Daft and Beam.

    Parameters
    ----------
    config : EmbeddingConfig, str or path
        A configuration, or the path of one that is read when the function is called.
    **arguments : object
        num_required, reduction, seed, threads, init (a folder of tables); and the options of ``Engine.stage``.

    Returns
    -------
    StageFunction

    Raises
    ------
    UsageError
        For slots that no table has, if ``config`` is a configuration.
    UsageTypeError
        For an unknown argument.

    Examples
    --------
    >>> import penstock as ps
    >>> import pyarrow as pa
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
    >>> stage = ps.stage_fn(ps.EmbeddingConfig.from_tables([table]))
    >>> deltas = stage(pa.table({"step": [0, 0], "id": [5, 3], "gradient": [[1.0, 2.0], [2.0, 2.0]]}))
    >>> deltas["id"].to_pylist(), deltas["row"].to_pylist()
    ([3, 5], [[0.5, 0.5], [0.75, 0.5]])
    """
    function = StageFunction(config, **arguments)
    if isinstance(config, EmbeddingConfig):
        _ = function.schema
    return function
