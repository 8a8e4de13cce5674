"""What an engine does with a source: run to its end, or stage its deltas as a stream that is read as somebody asks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

import pyarrow as pa

from penstock.deltas import DeltaArguments
from penstock.errors import UsageError
from penstock.io.storage.delta_sink import DeltaWriter, open_deltas
from penstock.run import Flow, FlowArguments
from penstock.stats import Report
from penstock.validation import check_known, place

if TYPE_CHECKING:
    from penstock.engine import Engine


class StageArguments(FlowArguments, DeltaArguments, total=False):
    """What ``Engine.stage`` takes beside the source: how it is applied, and what deltas hold."""


class RunArguments(StageArguments, total=False):
    """What ``Engine.run`` takes beside the source: as for a stage, and where deltas are written.

    deltas : a file that is not there yet, a pipe, "-" or a URI; numbered unless the call says otherwise. With
        ``checkpoint`` a file: what it holds and what is committed go together, and ``resume`` goes on with both
    """

    deltas: str | os.PathLike[str] | None


def stage(engine: Engine, source: Any, **arguments: Unpack[StageArguments]) -> pa.RecordBatchReader:
    """See ``Engine.stage``. Arguments are looked at now, the source is opened by the first pull."""
    check_known("Engine.stage", arguments, StageArguments.__annotations__)
    of_deltas, of_flow = _parted(arguments)
    deltas = engine._make_deltas(**of_deltas)
    flow = Flow(engine, source, deltas=deltas, **of_flow)
    return pa.RecordBatchReader.from_batches(deltas.schema, flow.batches())


def run(engine: Engine, source: Any, **arguments: Unpack[RunArguments]) -> Report:
    """See ``Engine.run``."""
    check_known("Engine.run", arguments, RunArguments.__annotations__)
    of_deltas, of_flow = _parted(arguments)
    target = of_flow.pop("deltas", None)
    if target is None:
        if of_deltas:
            raise UsageError(f"{next(iter(of_deltas))}: says what deltas hold; give deltas= too")
        return Flow(engine, source, **of_flow).run()
    deltas = engine._make_deltas(**{"numbered": True, **of_deltas})
    flow = Flow(engine, source, deltas=deltas, **of_flow)
    if not deltas.come_out_here:
        return flow.run()
    place("deltas", target)

    def opened(committed: Mapping[str, Any] | None, is_counted: Callable[[], bool] | None) -> DeltaWriter:
        return open_deltas(target, deltas.schema, engine._changed_step, committed, is_counted)

    return flow.run(opened)


def _parted(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What deltas hold, and the rest."""
    of_deltas = {name: value for name, value in arguments.items() if name in DeltaArguments.__annotations__}
    return of_deltas, {name: value for name, value in arguments.items() if name not in of_deltas}
