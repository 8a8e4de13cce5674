"""``Engine.stage``: gradients in, deltas out, as one Arrow stream that is read only as far as somebody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import pyarrow as pa

from penstock.deltas import DeltaArguments, Deltas
from penstock.flow import Flow, FlowArguments

if TYPE_CHECKING:
    from penstock.engine import Engine


class StageArguments(FlowArguments, DeltaArguments, total=False):
    """What ``Engine.stage`` takes beside the source: what a run takes, and what deltas are to hold."""


def stage(engine: Engine, source: Any, **arguments: Unpack[StageArguments]) -> pa.RecordBatchReader:
    """A reader of deltas; see ``Engine.stage``. Arguments are looked at now, the source is opened by the first pull."""
    of_run: dict[str, Any] = {**arguments}
    of_deltas = {name: of_run.pop(name) for name in DeltaArguments.__annotations__ if name in of_run}
    deltas = Deltas(engine, **of_deltas)
    flow = Flow(engine, source, deltas=deltas, **of_run)
    return pa.RecordBatchReader.from_batches(deltas.schema, flow.batches())
