"""The frames of all processes in one order: in every round the next frame of every source, in the order of the sources.

The order is that of ``merge="round"`` in one process, whatever the number of processes. Source i is read by process
``i % count``, on a thread of its own, ahead of the round that is applied; its rows are dealt to their owners there.
A round is one exchange; then every process hands out the same frames, each with its own rows of them and everything
else as it was (counts, step, rates, what a position must know). An error is part of the order: the frames before it
are handed out everywhere, then it is raised everywhere.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, Protocol

import pyarrow as pa

from penstock.distributed.packing import Entry, Received, for_oneself, packed, routed, unpacked
from penstock.distributed.peers import TICK_S, Peers
from penstock.distributed.relay import described, raised
from penstock.errors import UsageError
from penstock.frames import Frame, fingerprint
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.sources.opening import Source, open_sources
from penstock.tables.shares import Share

# Rounds that are read and dealt out before their turn.
_AHEAD = 2


class Saving(Protocol):
    """What rounds carry for commits."""

    def is_busy(self) -> bool: ...

    def agree(self, anybody_busy: bool) -> None: ...


class Says(Protocol):
    """What a process says of itself: process 0 is told with a round, now and then."""

    def comes_from(self, source: int) -> None: ...

    def due(self) -> dict[str, Any] | None: ...

    def heard(self, rank: int, told: Mapping[str, Any]) -> None: ...


class RoundsReader(FrameReader):
    """A FrameReader over the sources of all processes, each of which has one.

    source : the same number of sources everywhere; only this process's own are looked at
    saves : told with every round whether anybody is still writing a commit
    """

    def __init__(
        self,
        peers: Peers,
        shares: Mapping[str, Share],
        source: Any,
        options: ReadOptions,
        saves: Saving,
        telling: Says,
    ) -> None:
        if options.merge not in (None, "round"):
            raise UsageError(f"merge: many processes take a frame of each source in turn; got {options.merge!r}")
        several = source if isinstance(source, list | tuple) and source else [source]
        mine = range(peers.rank, len(several), peers.count)
        # Rows go to their owners once they are known to be good: nobody else could say where a bad one came from.
        inside = replace(options, merge=None, unvalidated=False)
        self._own = {number: FrameReader(_one(several[number]), inside) for number in mine}
        self.options = replace(options, merge="round")
        self.sources = [
            self._own[n].sources[0] if n in self._own else Source(_name_of(s), _not_ours) for n, s in enumerate(several)
        ]
        self.first_bad: dict[str, str] = {}
        self.checksums: set[bool] = set()
        self._peers, self._shares, self._saves, self._telling = peers, shares, saves, telling
        self._whole = [False] * len(several)  # sources read to their end, with checksums that fit

    def numbered(self) -> Generator[tuple[int, Frame], None, None]:
        self._whole = [False] * len(self.sources)
        self.checksums = set()
        ahead = _Ahead(self._own_rounds())
        try:
            for number in itertools.count():
                entries = self._round(number, ahead)
                if not entries:
                    return
                for entry in entries:
                    yield from self._handed_out(entry)
        finally:
            ahead.close()

    @property
    def verified(self) -> bool:
        return bool(self._whole) and all(self._whole)

    def fraction(self) -> float | None:
        """Of this process's own sources."""
        shares = [reader.fraction() for reader in self._own.values()]
        return None if None in shares or not shares else sum(share or 0.0 for share in shares) / len(shares)

    # ---- this process's sources

    def _own_rounds(self) -> Generator[list[Entry], None, None]:
        with ExitStack() as stack:
            going = {n: stack.enter_context(closing(iter(reader))) for n, reader in self._own.items()}
            while going:
                entries = []
                for number in list(going):
                    entry = self._entry(number, going[number])
                    entries.append(entry)
                    if "num_rows" not in entry.about:
                        del going[number]
                yield entries

    def _entry(self, number: int, frames: Iterator[Frame]) -> Entry:
        """The next of a source."""
        reader = self._own[number]
        about: dict[str, Any] = {"source": number}
        try:
            frame = next(frames, None)
            about |= {"verified": reader.verified, "checksums": list(reader.checksums)}
            if frame is None:
                return Entry(about)
            about |= _about(frame, dict(reader.first_bad))
            reader.first_bad.clear()
            return Entry(about, routed(frame, self._shares), _stream_of(frame.bad_rows))
        except Exception as error:  # whatever it is, it is raised in its turn by every process
            return Entry({"source": number, "error": described(error)})

    # ---- everybody's

    def _round(self, number: int, ahead: _Ahead) -> list[Received]:
        """What everybody has for a round, in the order of the sources; empty when all have ended."""
        try:
            heads, entries = self._exchanged(number, ahead)
        except BaseException as error:
            raise self._peers.fail(error) from None  # who is where is not known any more
        self._saves.agree(any(its["busy"] for its in heads))
        if any(its["stop"] for its in heads):
            raise self._agreed(KeyboardInterrupt())  # here, between two frames, in every process
        return sorted(entries, key=lambda entry: entry.about["source"])

    def _exchanged(self, number: int, ahead: _Ahead) -> tuple[list[dict[str, Any]], list[Received]]:
        peers = self._peers
        own = ahead.next(lambda: peers.stopping)
        head = {"stop": own is None, "busy": self._saves.is_busy()}
        to_first = {**head, "of": self._telling.due()} if peers.rank else head
        outgoing = [
            packed(head if rank else to_first, own or [], rank) if rank != peers.rank else []
            for rank in range(peers.count)
        ]
        heads, entries = [head], [for_oneself(entry, peers.rank) for entry in own or []]
        for rank, message in enumerate(peers.exchange(f"round {number}", outgoing)):
            if rank != peers.rank:
                its_head, its_entries = unpacked(message)
                if its_head.get("of") is not None:
                    self._telling.heard(rank, its_head["of"])
                heads.append(its_head)
                entries += its_entries
        return heads, entries

    def _agreed(self, error: BaseException) -> BaseException:
        """An error that everybody raises after the same frame."""
        self._peers.agreed = error
        return error

    def _handed_out(self, entry: Received) -> Iterator[tuple[int, Frame]]:
        about = entry.about
        if "error" in about:
            raise self._agreed(raised(about["error"]))
        self._whole[about["source"]] = about["verified"]
        self.checksums.update(about["checksums"])
        if "num_rows" in about:
            for reason, first in about["first_bad"].items():
                self.first_bad.setdefault(reason, first)
            self._telling.comes_from(about["source"])
            dims = {table: dim for table, (_, dim) in self.options.sizes.items()}
            yield about["source"], entry.frame(dims, _batches_of(entry.bad))


class _Ahead:
    """Rounds read ahead on a thread of their own; None where it was asked to stop waiting for one."""

    def __init__(self, rounds: Generator[list[Entry], None, None]) -> None:
        self._rounds = rounds
        self._read: queue.Queue[list[Entry]] = queue.Queue(_AHEAD)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="penstock-rounds", daemon=True)
        self._thread.start()

    def next(self, stopping: Callable[[], bool]) -> list[Entry] | None:
        """The next round; empty once the sources have ended."""
        while not stopping():
            over = not self._thread.is_alive()  # asked before the queue: what it has put is there then
            try:
                return self._read.get(timeout=0 if over else TICK_S)
            except queue.Empty:
                if over:
                    return []
        return None

    def close(self) -> None:
        """Read no further. A thread that waits for a pipe is left to it."""
        self._closed = True
        self._thread.join(TICK_S * 10)

    def _run(self) -> None:
        with closing(self._rounds):
            for entries in self._rounds:
                while not self._closed:
                    try:
                        self._read.put(entries, timeout=TICK_S)
                        break
                    except queue.Full:
                        continue
                if self._closed:
                    return


def _about(frame: Frame, first_bad: Mapping[str, str]) -> dict[str, Any]:
    """What of a frame goes to everybody."""
    return {
        "tables": list(frame.rows),
        "num_rows": frame.num_rows,
        "step": frame.local_step,
        "contributor": frame.contributor,
        "rates": frame.learning_rates,
        "dropped": dict(frame.dropped),
        "name": frame.source,
        "truncated": frame.truncated,
        "fingerprint": fingerprint(frame),
        "first_bad": first_bad,
    }


def _one(source: Any) -> Any:
    """A source of a list as the only one: a list of batches must not be taken for several."""
    return source if isinstance(source, str | os.PathLike) or not isinstance(source, list | tuple) else iter(source)


def _name_of(source: Any) -> str:
    """What another process's source is called: as it calls it itself."""
    return os.fsdecode(source) if isinstance(source, str | os.PathLike) else open_sources(source)[0].name


def _not_ours() -> Any:
    raise AssertionError("another process reads this source")


def _stream_of(batches: tuple[Any, ...]) -> bytes:
    if not batches:
        return b""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def _batches_of(stream: Any) -> tuple[Any, ...]:
    return tuple(pa.ipc.open_stream(stream)) if len(stream) else ()
