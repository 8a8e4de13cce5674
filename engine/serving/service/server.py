"""The Flight service: an engine with its sequencer, readers and Flight server, from the first call to the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import penstock
from penstock.api.engine import Engine
from penstock.base.events import report
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.partitions.broker_partition import Partition
from penstock.model.learning_rates import LearningRates
from penstock.serving.flight.connection import Address
from penstock.serving.service.auth import Certificates, Tokens
from penstock.serving.service.broker_intake import BrokerIntake
from penstock.serving.service.delta_log import DeltaLog
from penstock.serving.service.flight_server import FlightServer
from penstock.serving.service.limits import Limits
from penstock.serving.service.listener import Listener
from penstock.serving.service.lookup_streams import EngineRows, LookupAnswers, LookupCounts
from penstock.serving.service.put_streams import Producers
from penstock.serving.service.sequencer import Saving, Sequencer
from penstock.serving.service.subscriptions import Readers


class Service:
    """An engine that producers push to and readers follow. It listens once it is constructed.

    address : to listen at; port 0 selects a free port
    tls : certificate and key
    tokens : each of them admits a caller in its role; none: every caller is admitted
    reading : how streams of gradients are decoded
    per_steps : steps per delta; None: one delta per commit, or per step without a checkpoint
    last : whether deltas and tables say when each key of a dynamic table occurred last
    partitions : of brokers, which are producers from the start; patience_s : how long to retry while a broker is gone

    wants_to_end : set when a caller requests the end or the service cannot continue; then call ``end`` and ``close``
    close, renew : as of a Listener
    Raises ListenError if it cannot listen at the address, OSError if it cannot commit its start.
    """

    def __init__(
        self,
        engine: Engine,
        address: Address,
        reading: ReadOptions,
        rates: LearningRates,
        *,
        saving: Saving | None = None,
        limits: Limits | None = None,
        tls: Certificates | None = None,
        tokens: Tokens = MappingProxyType({}),
        per_steps: int | None = None,
        last: bool = False,
        partitions: Sequence[Partition] = (),
        patience_s: float = 60.0,
    ) -> None:
        limits = limits or Limits()
        self.engine = engine
        self.wants_to_end = threading.Event()
        self.log = DeltaLog(engine, per_steps, limits.delta_bytes, durable=saving is not None, last=last)
        self.sequencer = Sequencer(engine, rates, self.log, limits.producers, self.wants_to_end.set, saving)
        if engine.core.turns is not None:
            engine.core.turns.most_bytes = limits.queued_bytes
            engine.core.turns.drop_bad_rows(reading.on_bad_row != "error")
        self.producers = Producers(self.sequencer, reading, limits)
        self.readers = Readers(engine, self.sequencer, self.log)
        rows, self._lookup_counts = EngineRows(engine, self.sequencer), LookupCounts()
        self.lookups: Callable[[], LookupAnswers] = partial(LookupAnswers, rows, limits, self._lookup_counts)
        self._started_s = time.monotonic()
        self._watched = ExitStack()
        self._watched.enter_context(engine.watch.run(self.sequencer.counters, lambda: None, self.sequencer.first_bad))
        try:
            self._listener = Listener(address, tokens, limits, tls or [], partial(FlightServer, self))
            engine.watch.of_service = self._counts
            self._listener.listen()
        except BaseException:
            self.sequencer.end()
            self._watched.close()
            raise
        self.address, self.close, self.renew = self._listener.address, self._listener.close, self._listener.renew
        self.admission, self.connections = self._listener.admission, self._listener.connections
        report("listening", address=self.address.uri, step=engine.global_step)
        messages = replace(reading, max_message=limits.message_bytes)
        self._intake = BrokerIntake(self.sequencer, messages, partitions, patience_s, self.wants_to_end.set)

    def end(self) -> None:
        """Take no more frames, commit, and notify all streams. Raises the error of the last commit."""
        report("ending", step=self.engine.global_step, pending=self.engine.core.num_pending)
        try:
            self._intake.end()
            self.sequencer.end()
            if (error := self.sequencer.error or self._intake.error) is not None:
                raise error
        finally:
            self._watched.close()

    def status(self) -> dict[str, Any]:
        """Return the status as plain data, for JSON."""
        sequencer, log, counters = self.sequencer, self.log, self.sequencer.counters
        expired_waiting = self.engine.core.expired_waiting()
        with self.engine.gate.still():
            tables = self.engine.core.table_reports(expired_waiting)
            return {
                "service": "engine",
                "state": "draining" if self.wants_to_end.is_set() or sequencer.is_closing else "serving",
                "penstock": penstock.__version__,
                "global_step": self.engine.global_step,
                "committed_step": sequencer.streams.durable_step if sequencer.streams.is_durable else None,
                "deltas": {"from_step": log.first_step, "to_step": log.step, "bytes": log.num_bytes},
                "frame_times": log.frame_times,
                "version": str(self.engine.version),
                "epochs": [epoch.get_state() for epoch in sequencer.streams.lineage.epochs],
                **{name: getattr(counters, name) for name in ("rows", "frames", "stale", "rolled_back", "steps")},
                "pending": self.engine.core.num_pending,
                "num_required": self.engine.gate.num_required,
                "reduction": self.engine.reduction,
                **self._rounds(),
                "dropped": dict(counters.dropped),
                "keys": {name: asdict(table.keys) for name, table in tables.items() if table.keys is not None},
                **self._counts(),
                "seconds": time.monotonic() - self._started_s,
            }

    def _rounds(self) -> dict[str, Any]:
        """Return the workers of rounds and whom they wait for."""
        turns = self.engine.core.turns
        if turns is None:
            return {"max_staleness": self.engine.core.policy.max_staleness}
        wait = self.sequencer.waits()
        rounds = {
            "workers": [turns.names.name(number) for number in range(turns.names.count)],
            "missing": wait.missing,
            "waited_s": wait.waited_s,
            "early": turns.early_frames(),
            "absent": dict(turns.absent),
            "skipped": turns.skipped,
        }
        return {"rounds": rounds}

    def _counts(self) -> dict[str, int]:
        """Return the counts of producers and callers."""
        return {
            "producers": len(self.sequencer.streams.producers),
            "streams": self.sequencer.streams.num_open,
            "queued_rows": self.producers.budget.num_rows,
            "queued_bytes": self.producers.budget.num_bytes,
            **self._listener.counts(),
            **self._lookup_counts.as_dict(),
        }
