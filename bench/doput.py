"""DoPut: a step pushed over loopback into ``penstock serve``, a separate process on the same CPUs.

It takes turns with ``Replay`` of the same steps, which needs no network and no second process, and with a bare DoPut of
the same batches into a Flight server that discards them, which needs nothing else.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from penstock.bench.distributions import Int64
from penstock.bench.penstock_adapter import Ours, config_of
from penstock.bench.workloads import Float32, Step, Workload
from penstock.serving.flight import connect

SERVE = [sys.executable, "-m", "penstock", "serve"]
DISCARD = [sys.executable, "-m", "penstock.bench.doput"]
ENDS_WITHIN_S = 10


class DoPut(Ours):
    """A producer that pushes steps as one frame each, and waits until all are applied (the last acknowledgement).

    The service ends with this object.
    """

    def __init__(self, workload: Workload, steps: Sequence[Step], threads: int, folder: Path) -> None:
        self._steps = steps
        config = folder / "tables.pbtxt"
        config_of(workload, "adagrad").save(config)
        command = [*SERVE, str(config), "--threads", str(threads), "--no-hash"]
        self._client = connect(started(self, command, folder / "serve.txt"))

    def run(self, steps: Sequence[int]) -> None:
        self._client.put((self._steps[number].batches for number in steps), "bench")

    def read_rows(self, table: str, ids: Int64) -> Float32:
        return self._client.lookup(table, ids)


class Discarded(Ours):
    """A bare Flight client that pushes the batches of steps into a server that discards them."""

    def __init__(self, steps: Sequence[Step], folder: Path) -> None:
        self._steps = steps
        self._client = flight.connect(started(self, DISCARD, folder / "discard.txt"))

    def run(self, steps: Sequence[int]) -> None:
        path = flight.FlightDescriptor.for_path("bench")
        writer, reader = self._client.do_put(path, self._steps[steps[0]].batches[0].schema)
        for number in steps:
            for batch in self._steps[number].batches:
                writer.write_batch(batch)
        writer.done_writing()
        reader.read()  # the one message of the server, after the last batch
        writer.close()


class Discarding(flight.FlightServerBase):  # type: ignore[misc]
    """A server that discards all batches.

    It answers a DoPut by one message after the last batch, and an exchange by a batch of zeros for each: as many rows,
    of the dim that is the path.
    """

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        for _ in reader:
            pass
        writer.write(b"read")

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        dim = int(descriptor.path[0])
        writer.begin(pa.schema({"row": pa.list_(pa.float32(), dim)}))
        for batch, _ in reader:
            zeros = pa.array(np.zeros(len(batch) * dim, np.float32))
            writer.write_batch(pa.record_batch({"row": pa.FixedSizeListArray.from_arrays(zeros, dim)}))


def started(owner: object, command: Sequence[str], log: Path) -> str:
    """Start a service, which ends with its owner; return the address in its first line.

    log : the file for its errors. Raises RuntimeError with the last of them if it does not start.
    """
    with log.open("w") as errors:
        service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    weakref.finalize(owner, _end, service)
    assert service.stdout is not None
    words = service.stdout.readline().split()
    if len(words) > 1:
        return words[1].rstrip(",")
    service.wait()
    raise RuntimeError(f"{log.stem}: " + (log.read_text().strip().splitlines() or ["no output"])[-1])


def _end(service: subprocess.Popen[str]) -> None:
    service.terminate()
    try:
        service.communicate(timeout=ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        service.kill()
        service.communicate()


if __name__ == "__main__":
    with Discarding("grpc://127.0.0.1:0") as server:
        print(f"at grpc://127.0.0.1:{server.port}", flush=True)
        server.serve()
