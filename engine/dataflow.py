"""An engine as a function over record batches, to be sent to where a data flow runs (docs/stages.md).

Spark, Ray, Dask, Daft and Beam pickle a function and call it on their workers. What is here holds a configuration and
arguments alone, and makes its engine where it is called: jax is loaded there, and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.config.embedding import EmbeddingConfig
from penstock.deltas import DeltaOptions, form_of
from penstock.run import RunOptions
from penstock.validation import check_known

if TYPE_CHECKING:
    from penstock.engine import Engine


# Of the engine, and tables to start from (``Engine.read_tables``).
ENGINE_OPTIONS = frozenset({"num_required", "reduction", "seed", "threads", "init"})
STAGE_OPTIONS = frozenset(field.name for options in (RunOptions, DeltaOptions) for field in fields(options))


class StageFunction:
    """Gradients in, deltas out, each call with an engine of its own: what ``stage_fn`` gives.

    schema : of the deltas; asking for it makes no engine
    """

    def __init__(self, config: EmbeddingConfig | str | os.PathLike[str], **arguments: Any) -> None:
        """config : or the path of one, which is then read where the function is called"""
        check_known(type(self).__name__, arguments, ENGINE_OPTIONS | STAGE_OPTIONS)
        self._config = config
        self._of_engine = {name: value for name, value in arguments.items() if name in ENGINE_OPTIONS}
        self._of_stage = {name: value for name, value in arguments.items() if name in STAGE_OPTIONS}

    @property
    def schema(self) -> pa.Schema:
        named = ("slots", "op", "numbered")
        return form_of(self._loaded().tables, **{n: v for n, v in self._of_stage.items() if n in named}).schema

    def __call__(
        self, batches: Iterable[pa.RecordBatch] | pa.RecordBatch | pa.Table
    ) -> Iterator[pa.RecordBatch] | pa.Table:
        """An iterator of batches gives an iterator of batches, lazily; a table, or one batch, gives a table."""
        if isinstance(batches, pa.RecordBatch | pa.Table):
            return self._made().stage(batches, **self._of_stage).read_all()
        return self._deltas(batches)

    def _deltas(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from self._made().stage(batches, **self._of_stage)

    def _loaded(self) -> EmbeddingConfig:
        return self._config if isinstance(self._config, EmbeddingConfig) else EmbeddingConfig.load(self._config)

    def _made(self) -> Engine:
        from penstock.engine import Engine

        arguments = dict(self._of_engine)
        init = arguments.pop("init", None)
        engine = Engine(self._loaded(), **arguments)
        if init is not None:
            engine.read_tables(init)
        return engine


class BlockStage(StageFunction):
    """Gradients in, deltas out, block by block, all calls with one engine: Ray's ``map_batches`` makes one per actor.

    A block ends its last frame, as the end of a source does: give blocks of whole frames.
    """

    _engine: Engine | None = None

    def _made(self) -> Engine:
        if self._engine is None:
            self._engine = super()._made()
        return self._engine

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_engine"}


def stage_fn(config: EmbeddingConfig | str | os.PathLike[str], **arguments: Any) -> StageFunction:
    """A function from gradient batches to deltas that can be pickled: for Spark, Ray, Dask, Daft, Beam.

    config : or the path of one, which is then read where the function is called
    arguments : num_required, reduction, seed, threads, init (a folder of tables); and what ``Engine.stage`` takes

    Raises UsageError for slots that no table has, where config is one.
    """
    function = StageFunction(config, **arguments)
    if isinstance(config, EmbeddingConfig):
        _ = function.schema
    return function
