"""A store over a Flight service: lookups on a connection per thread, and frames of one producer, each applied once.

The service may restart at any moment, from a commit that lacks the last frames. So frames stay buffered until they are
durable, a thread sends them again meanwhile, and rows of an earlier step than the last known one are read again once
that has happened. It may also stop to answer, or wait for ranks that are gone: ``limited_calls`` limits every wait.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

import penstock.base.forks as forks
from penstock.base.errors import ConfigError, DeltasGoneError, InputError, PenstockError, StateError, UsageError, listed
from penstock.base.limited_calls import CallThread, LimitedCall, check_awaited, in_call, waits_for
from penstock.contrib.torch.stores import (
    ROWS_AS_THEY_ARE,
    Block,
    Ids,
    Pulled,
    StepReport,
    Store,
    TableContents,
    TableInfo,
)
from penstock.io.list_columns import list_column, list_type
from penstock.model.frames import Float32
from penstock.model.version import Version
from penstock.rows.initializers import InitialRows
from penstock.serving.flight import Client
from penstock.serving.flight.messages import Ack
from penstock.serving.flight.producer import Producer
from penstock.serving.followers.follower import at_one_version
from penstock.serving.followers.target import FollowedJob

T = TypeVar("T")

# Between two questions whether a frame is applied: at first, and at most.
_PAUSE_S, _MOST_PAUSE_S = 0.0002, 0.02
# How often the thread looks whether the service has restarted.
_WATCH_S = 0.25
# A service answers no request of more ids, or with rows of more bytes (by default: --max-message).
_MOST_IDS, _MOST_BYTES = 1 << 16, 64 << 20
# How long the service may wait for rows of one step.
_TIMEOUT_MS = 60_000
# How often a wait for the gate asks what the gate waits for, and after how long the first time.
_EXPLAIN_EVERY_S, _EXPLAIN_FIRST_S = 1.0, 0.1
# How long ``close`` waits for work whose caller has given up.
_GRACE_S = 1.0


class ServiceStore(Store):
    """The tables of a service.

    connect : returns a new client; contributor : the name of the producer; timeout_s : the limit of each wait
    """

    def __init__(self, connect: Callable[[], Client], contributor: str, timeout_s: float) -> None:
        super().__init__()
        self._connect, self.contributor, self._timeout_s = connect, contributor, timeout_s
        self._clients: list[Client] = []
        self._of_thread = threading.local()
        # Of the producer, which the threads of calls and the watching one use in turn.
        self._lock, self._pusher = threading.RLock(), self._new_client()
        self._uri = self._pusher.connection.uri
        self._threads: list[CallThread] = []
        self._last_call = LimitedCall[Any]("")
        self._producer: Producer | None = None
        self._first_number = 0  # of the next producer; 0: the one after what the service has applied
        self._base = 0  # frames of the contributor before this producer
        self._repeated = 0  # of its frames, those that the service had applied in an earlier run
        self._counted = 0, 0  # frames of this store before this producer: applied, stale
        self._has_returned = False  # whether load_state_dict has said which frames precede the first one
        self._closing = threading.Event()
        self._watch: threading.Thread | None = None
        try:
            status, schemas = self._limited(lambda: (self._client.status(), self._client.tables()), "its status")
        except BaseException:
            self.close()
            raise
        self.num_required, self.reduction = status["num_required"], status["reduction"]
        self.in_rounds = "rounds" in status
        self._version = status.version  # of the newest rows that are known
        self.report = StepReport(self._version.step, 0, 0, status["pending"])
        self.tables = {name: _info(schema) for name, schema in schemas.items()}
        self._kind = list_type(info.dim for info in self.tables.values())
        self._names = pa.array(list(self.tables), pa.utf8())
        is_unsigned = any(schema.field("id").type == pa.uint64() for schema in schemas.values())
        self._id_type = np.uint64 if is_unsigned else np.int64  # of frames

    def __repr__(self) -> str:
        return f"Store({self._uri})"

    def _check_open(self) -> None:
        super()._check_open()
        forks.check(self._process, f"the store of {self._uri}")

    # ---- waits

    def _limited(self, function: Callable[[], T], purpose: str) -> T:
        """Return the result of a function. purpose : what it waits for first

        Every thread has another one for its calls. Raises ServiceTimeoutError after the limit.
        """
        if in_call():
            return function()
        thread: CallThread | None = getattr(self._of_thread, "calls", None)
        if thread is None:
            thread = self._of_thread.calls = CallThread("penstock-store")
            self._threads.append(thread)
        return self.outcome(thread.submit(function, purpose))

    def outcome(self, call: LimitedCall[T]) -> T:
        self._last_call = call
        return call.outcome(self._uri, self._timeout_s)

    # ---- rows out

    def _pull(self, ids: Mapping[str, Ids]) -> Pulled:
        purpose = f"the rows of {sum(map(len, ids.values())):,} ids at step {self.report.step} or later"
        return self._limited(lambda: self._pulled(ids, purpose), purpose)

    def _pulled(self, ids: Mapping[str, Ids], purpose: str) -> Pulled:
        """Return rows that are no older than the last known step. Those of several requests may be of several steps
        if other ranks push meanwhile; the earliest counts."""
        while True:
            check_awaited()
            waits_for(purpose)
            requests = _requests(ids, self.tables)
            results = [self._client.lookup(part, consistent=True, timeout_ms=_TIMEOUT_MS) for part in requests]
            first = min((result.version for result in results), key=lambda version: version.step)
            if first.lineage != self._version.lineage:
                raise StateError(
                    f"{self._uri}: the service's state is another one than before; it was restarted "
                    "without its checkpoint, or with another one"
                )
            if first.step >= self.report.step and {result.version.epoch for result in results} == {self._version.epoch}:
                parts = {name: [result[name] for result in results if name in result] for name in ids}
                rows = {
                    name: _writable(part[0] if len(part) == 1 else np.concatenate(part)) for name, part in parts.items()
                }
                return Pulled(rows, first)
            self._settle()  # the service has restarted
            self._version = results[-1].version

    @property
    def _client(self) -> Client:
        """The client of lookups of this thread."""
        client: Client | None = getattr(self._of_thread, "client", None)
        if client is None:
            client = self._of_thread.client = self._new_client()
        return client

    def _new_client(self) -> Client:
        client = self._connect()
        self._clients.append(client)
        return client

    def _contents(self, names: Sequence[str]) -> dict[str, TableContents]:
        def fetch() -> dict[str, TableContents]:
            job = FollowedJob.of(self._client)
            job = replace(job, tables={name: job.tables[name] for name in names})
            while True:
                check_awaited()
                tables = {name: self._client.table(name) for name in names}
                with suppress(DeltasGoneError):
                    rows, _ = at_one_version(self._client, job, tables)
                    return {
                        each.table: TableContents(each.rows, None if tables[each.table].keys is None else each.ids)
                        for each in rows
                    }

        return self._limited(fetch, f"tables of one step: {listed(names)}")

    # ---- gradients in

    def check_rates(self, tags: Collection[int]) -> None:
        for name, info in self.tables.items():
            if info.tag is not None and info.tag not in tags and info.served_rate is None:
                raise UsageError(
                    f"learning_rates: frames carry the rates of all dynamic tags, and that of table '{name}' is "
                    f"missing; give it, too, or start the service with --learning-rate {info.tag}=VALUE"
                )

    def _push(self, blocks: Sequence[Block], step: int, rates: Mapping[int, float] | None) -> None:
        # A rank without rows has its turn in a round all the same.
        no_rows = None if blocks else self.report.step
        nothing = Block({}, np.zeros((0, next(iter(self.tables.values())).dim), np.float32))
        batches = [self._batch(block, step, rates) for block in blocks or [nothing]]
        self._limited(lambda: self._pushed(batches, no_rows), f"its position of producer '{self.contributor}'")

    def _pushed(self, batches: list[pa.RecordBatch], no_rows: int | None = None) -> None:
        """Send a frame, and wait until it is applied. no_rows : of one without rows, its step"""
        try:
            with self._lock:
                producer = self._open_producer()
                waits_for(f"its connection to take frame {self.frames + 1} of '{self.contributor}'")
                try:
                    producer.send(batches, step=no_rows)
                finally:
                    self.frames = producer.last  # also if the frame stays buffered
            self._settle()
        except (InputError, ConfigError):  # the service has refused the frame, and would again
            self._producer = None
            raise

    def _batch(self, block: Block, step: int, rates: Mapping[int, float] | None) -> pa.RecordBatch:
        """Return a block as rows of a frame, without a copy of its gradients."""
        numbers = {name: number for number, name in enumerate(self.tables)}
        counts = np.array([len(ids) for ids in block.ids.values()], np.int64)
        codes = np.repeat(np.array([numbers[name] for name in block.ids], np.int32), counts)
        # One type in all frames of the stream. Exact: these ids have been looked up, so that the tables have them.
        ids = np.concatenate([np.zeros(0, self._id_type), *block.ids.values()], dtype=self._id_type, casting="unsafe")
        columns = {
            "table": pa.DictionaryArray.from_arrays(pa.array(codes), self._names),
            "step": pa.array(np.full(len(ids), step)),
            "id": pa.array(ids),
            "gradient": list_column(block.rows, self._kind),
        }
        if rates is not None:
            # A tag without an entry has a rate of the service's flags, which take precedence.
            served = {info.tag: info.served_rate for info in self.tables.values() if info.tag is not None}
            values = np.array([rates.get(tag, served[tag]) for tag in sorted(served)], np.float32)
            columns["learning_rates"] = list_column(np.tile(values, (len(ids), 1)), list_type([len(values)]))
        return pa.RecordBatch.from_pydict(columns)

    def _open_producer(self) -> Producer:
        """Return the producer of this contributor, whose next frame follows those that the service has applied."""
        if self._producer is None:
            producer = self._pusher.producer(self.contributor)  # from here on, nobody else has frames of this name
            counts = self._counts()
            while counts["position"] != counts["durable_position"]:
                check_awaited()
                self._pusher.checkpoint()  # else a crash could take frames back that precede the first one
                counts = self._counts()  # which a restart may have taken back meanwhile
            first = self._first_number or counts["position"] + 1
            if first > counts["position"] + 1:
                raise StateError(
                    f"load_state_dict: the state is of {first - 1} frames of '{self.contributor}', and {self._uri} has "
                    f"{counts['position']}: it is another service, or an older commit of it; to begin anew with its "
                    "rows, load state['dense'] into the dense optimizer alone"
                )
            producer.begin_at(first)
            self._producer, self._first_number = producer, 0
            self.frames = self._base = first - 1
            self._repeated = counts["position"] - self._base
            if self.in_rounds and self.synchronous and not self._has_returned:
                self.earlier_frames = self._base
            self._counted = self.report.applied, self.report.stale
        if self._watch is None or not self._watch.is_alive():
            self._watch = threading.Thread(target=self._resend, name="penstock-resends", daemon=True)
            self._watch.start()
        return self._producer

    def _counts(self) -> dict[str, Any]:
        return self._pusher.connection.act("position", contributor=self.contributor)

    def _resend(self) -> None:
        """Send frames again after a restart of the service: another rank may wait for them while this one computes."""
        while not self._closing.wait(_WATCH_S):
            with self._lock:
                try:
                    if (producer := self._producer) is not None:  # it is dropped without the lock
                        producer.poll()
                except PenstockError:
                    return  # the next push or pull raises it

    def _settle(self) -> None:
        """Wait until all frames are applied, and if ranks are synchronous, until the gate has opened with them.

        A frame that the service skips because it was applied before an interruption needs no opening, unless it is
        still in the gate.
        """
        pause_s, explain_at_s = _PAUSE_S, time.monotonic() + _EXPLAIN_FIRST_S
        waits_for(f"its answer about frame {self.frames} of '{self.contributor}'")
        while True:
            with self._lock:
                if (producer := self._producer) is None:
                    status = self._pusher.status()
                    self.report = self.report._replace(step=status.version.step, pending=status["pending"])
                    return
                answer = producer.poll()
                is_opened = not self.synchronous or not producer.num_in_gate
                if answer.position >= self.frames and is_opened:
                    self._check_skipped(answer)
                    applied, stale = self._counted
                    counts = applied + answer.applied, stale + answer.stale
                    self.report = StepReport(answer.step, *counts, answer.pending)
                    return
                check_awaited()
                if time.monotonic() >= explain_at_s:
                    explain_at_s = time.monotonic() + _EXPLAIN_EVERY_S
                    waits_for(self._explained(answer))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _explained(self, answer: Ack) -> str:
        """Return what a frame waits for. answer : of the service, about the frames of this producer"""
        frame = f"frame {self.frames} of '{self.contributor}'"
        if answer.position < self.frames:
            return f"{frame} to be applied; it has {answer.position}, at step {answer.step}"
        gate = self._pusher.connection.act("explain")
        if self.in_rounds:
            return f"step {answer.step + 1} with {frame}; missing: {listed(gate['missing'])}; the gate: {gate['gate']}"
        is_rank = re.fullmatch(r"rank-\d+", self.contributor) is not None
        names = [f"rank-{rank}" for rank in range(self.num_required)] if is_rank else gate["without_frame"]
        missing = listed(name for name in names if name not in gate["frames"]) or "producers without any frame so far"
        return f"the opening of step {answer.step + 1} with {frame}; missing: {missing}; the gate: {gate['gate']}"

    def _check_skipped(self, answer: Ack) -> None:
        """Raise UsageError if the service has skipped frames that no earlier run of this contributor can have sent."""
        skipped = self.frames - self._base - answer.applied - answer.stale
        if skipped > self._repeated:
            raise UsageError(
                f"{self._uri}: another stream of producer '{self.contributor}' has begun, and frames "
                "of this one were skipped; processes that push at the same time need different names (contributor=)"
            )

    # ---- checkpoints

    def seek(self, frames: int) -> None:
        self._check_not_pushed()
        self._producer = None  # which state_dict may have opened
        self.frames, self._first_number, self._has_returned = frames, frames + 1, True

    def _check_not_pushed(self) -> None:
        if self._producer is not None and self.frames > self._base:
            raise UsageError("load_state_dict: this store has pushed frames; load before the first step()")

    def claim(self) -> None:
        def taken_over() -> None:
            with self._lock:
                self._open_producer()

        self._check_not_pushed()
        self._has_returned = True
        self._limited(taken_over, f"its position of producer '{self.contributor}'")

    def make_durable(self) -> None:
        def commit() -> None:
            with self._lock:
                self._open_producer().wait()

        self._limited(commit, f"a commit with frame {self.frames} of '{self.contributor}'")

    def mark(self, keep: int) -> dict[str, Any]:
        if not (self.in_rounds and self.synchronous):
            return {}
        step = self.report.step
        tag = f"torch-{step}"
        act = partial(self._pusher.connection.act, "tag", name=tag, step=step, keep=keep)
        with suppress(UsageError):  # without a checkpoint no version stays
            self._limited(act, f"a commit of step {step}")
            return {"tag": tag, "version": str(self._version.at(step))}
        return {}

    def return_to(self, mark: Mapping[str, Any], is_first: bool) -> None:
        def back() -> None:
            status = self._pusher.status()
            if is_first and (str(status.version) != mark["version"] or status["pending"]):
                self._pusher.rollback(mark["tag"])
                status = self._pusher.status()
            self._version = status.version
            self.report = self.report._replace(step=status.version.step, pending=status["pending"])

        self._limited(back, f"its return to the tables of '{mark['tag']}'")

    def reference(self) -> dict[str, str]:
        return {"version": str(self._version.at(self.report.step)), "digest": ""}

    def _difference(self, saved: Version, current: Version) -> str:
        if saved.lineage != current.lineage:
            problem = "has the tables of another history of steps than these modules were saved with"
            return f"{self._uri} {problem}; if you want its rows, {ROWS_AS_THEY_ARE}"
        if saved.step > current.step:
            return f"expected tables of {self._uri} at step {saved.step} or later, got step {current.step}"
        return ""

    def _close(self) -> None:
        """Wait for the last acknowledgement, unless an earlier wait has reached its limit and continues elsewhere."""
        self._closing.set()
        try:
            if self._last_call.is_abandoned:
                wait([self._last_call], _GRACE_S)
                if not self._last_call.done():
                    return
            self._limited(self._end, f"its acknowledgement of frame {self.frames} of '{self.contributor}'")
        finally:
            for thread in self._threads:
                thread.close(waits=False)

    def _end(self) -> None:
        self._end_prefetches()
        if self._watch is not None:
            self._watch.join()
        try:
            if self._producer is not None:
                self._producer.close()
        finally:
            for client in self._clients:
                client.close()


def _requests(ids: Mapping[str, Ids], tables: Mapping[str, TableInfo]) -> list[dict[str, Ids]]:
    """Return the ids in requests of at most _MOST_IDS, and of _MOST_BYTES of rows; at least one."""
    requests: list[dict[str, Ids]] = [{}]
    room = _MOST_BYTES
    for name, table_ids in ids.items():
        # Of a row: no less, for the number of ids, and no more, so that the service refuses one that is too large.
        size = min(max(4 * tables[name].dim, _MOST_BYTES // _MOST_IDS), _MOST_BYTES)
        begin = 0
        while begin < len(table_ids) or not begin:
            if room < size:
                requests.append({})
                room = _MOST_BYTES
            requests[-1][name] = part = table_ids[begin : begin + room // size]
            room -= len(part) * size
            begin += len(part) or 1
    return requests


def _info(schema: pa.Schema) -> TableInfo:
    metadata = schema.metadata
    rows = metadata.get(b"penstock.vocabulary_size")
    dim, tag = schema.field("row").type.list_size, metadata.get(b"penstock.learning_rate_tag")
    rate = metadata.get(b"penstock.learning_rate")
    return TableInfo(
        dim,
        None if rows is None else int(rows),
        b"penstock.changes_alone" in metadata,
        None if tag is None else int(tag),
        None if rate is None else float(rate),
        b"penstock.frozen" in metadata,
        InitialRows(*json.loads(metadata[b"penstock.absent"])) if b"penstock.absent" in metadata else None,
    )


class _Writable:
    """Describes an array's memory as writable: that of an answer belongs to its reader alone, but Arrow has no word
    for it, and torch would warn."""

    def __init__(self, array: Float32) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _writable(array: Float32) -> Float32:
    return np.asarray(_Writable(array))
