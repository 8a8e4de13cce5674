"""Partitions of brokers as producers: one thread per partition reads messages, and passes their frames on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from penstock.base.errors import InputError, ServiceError
from penstock.base.events import report
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.partitions.broker_partition import Message, Partition
from penstock.io.partitions.message_frames import MessageFrames
from penstock.io.partitions.partition_reader import PartitionReader
from penstock.serving.flight.messages import Ack, PutRequest
from penstock.serving.service.sequencer import Sequencer
from penstock.serving.service.streams import Stream

# How long a thread waits for a message before it checks for the end, and requests a commit of what it has applied.
WAIT_S = 0.2
# In place of the identity of a process: the counts of the earlier stream continue after a restart.
_PROCESS = "broker"


class BrokerIntake:
    """Reads partitions until ``end``. failed : called once if a partition can be read no further

    error : why
    """

    def __init__(
        self,
        sequencer: Sequencer,
        options: ReadOptions,
        partitions: Sequence[Partition],
        patience_s: float,
        failed: Callable[[], object],
    ) -> None:
        self._sequencer, self._options = sequencer, options
        self._patience_s, self._on_failure = patience_s, failed
        self._over = threading.Event()
        self.error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name=f"penstock-{each.producer}", daemon=True)
            for each in partitions
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Read no further, and wait for the frame in flight. Call it before the sequencer ends."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, partition: Partition) -> None:
        try:
            self._read(partition)
        except BaseException as error:
            # Else the service ends, and has reported why.
            if not (isinstance(error, ServiceError) and self._sequencer.is_closing):
                self.error = self.error or error
                self._over.set()
                self._on_failure()
        finally:
            partition.close()

    def _read(self, partition: Partition) -> None:
        acked: deque[Ack] = deque(maxlen=1)
        position = self._sequencer.position(partition.producer)
        request = PutRequest(contributor=partition.producer, first=position + 1, process=_PROCESS)
        stream = self._sequencer.open(request, acked.append)
        report("producer_connected", contributor=stream.contributor, first=stream.next)
        try:
            reader = PartitionReader(partition, position, self._patience_s, stream.creation)
            frames = MessageFrames(self._options, self._sequencer.first_bad)
            while not self._over.is_set():
                messages = reader.read(WAIT_S)
                stream.creation = reader.creation
                for message in messages:
                    self._push(stream, frames, partition, message)
                    if self._over.is_set():
                        break
                if not messages and stream.acked.position < stream.position:
                    self._sequencer.ask_for_commit()
                if acked and (ack := acked.pop()).durable and ack.position:
                    partition.acknowledge(ack.position)
        finally:
            self._sequencer.close(stream)
            report("producer_left", contributor=stream.contributor, **stream.counts())

    def _push(self, stream: Stream, frames: MessageFrames, partition: Partition, message: Message) -> None:
        try:
            frame = frames.read(message, partition.place(message.number)).frame()
        except InputError as error:
            self._sequencer.rejected(error)
            raise
        self._sequencer.wait_for_room(stream, self._over.is_set)
        if self._over.is_set():
            return
        if frame.is_void:
            self._sequencer.pass_over(stream, message.number, next(iter(frame.dropped), None))
        else:
            self._sequencer.push(stream, frame, message.number)
