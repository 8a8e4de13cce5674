"""Shared memory or a socket? Frames of 5 MB and 138 MB pushed into ``penstock serve`` on one machine, in turns.

    python bench/experiments/transports.py [--repeats 15] [--mb 640]

Every repeat pushes the same frames once over each transport, in an order that rotates, so that other load on the
machine falls on all of them. The service and the producer are separate processes. The time ends with the last
acknowledgement, without a checkpoint and without readers. CPU seconds are those of both processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

import penstock as ps
from penstock.io.flight import Client, connection, put_frames
from penstock.io.flight.connection import Address, Connection

VOCABULARY, DIM = 1_000_000, 64
# Rows of a frame of 5.3 MB and of one of 138.4 MB.
SIZES = (20_000, 1 << 19)

# A service that listens on a UNIX socket, which ``--listen`` does not accept.
SERVE_UNIX = """
import sys
from penstock.cli.main import main
from penstock.io.flight.connection import Address
from penstock.service.connections import Connections
path = sys.argv.pop(1)
Address.uri = property(lambda self: f"grpc+unix://{path}")
Connections.began = Connections.ended = Connections.watch = lambda *_: None
sys.exit(main(sys.argv[1:]))
"""
EXPERIMENTS = "tcp_frame_size_tuning,tcp_rcv_lowat,peer_state_based_framing"
TUNED = [("grpc.http2.write_buffer_size", 64 << 20), ("grpc.optimization_target", "throughput")]


class UnixAddress(NamedTuple):
    uri: str
    tls: bool = False
    is_loopback: bool = True


class Transport(NamedTuple):
    """A client of one of the services. message_bytes : of one message; options : gRPC's, of the client"""

    name: str
    service: subprocess.Popen[str]
    address: Address | UnixAddress
    share_memory: bool
    message_bytes: int = put_frames.MESSAGE_BYTES
    options: tuple[tuple[str, int | str], ...] = ()

    def connect(self) -> Client:
        connection._OPTIONS[1:] = self.options
        opened = Connection(self.address, "", None, 30.0)  # type: ignore[arg-type]
        opened.opened()
        return Client(opened, self.share_memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--mb", type=int, default=640, help="of frames per push")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-transports-") as folder, ExitStack() as stack:
        transports = start(Path(folder), stack)
        clients = [stack.enter_context(transport.connect()) for transport in transports]
        for rows in SIZES:
            compare(transports, clients, rows, max(2, args.mb * 1_000_000 // (rows * (8 + 4 * DIM))), args.repeats)


def start(folder: Path, stack: ExitStack) -> list[Transport]:
    config = folder / "tables.pbtxt"
    tables = [ps.TableConfig(VOCABULARY, DIM, name="user", optimizer=ps.Adagrad(0.1))]
    ps.EmbeddingConfig.from_tables(tables).save(config)
    limits = [str(config), "--max-message", "1024", "--no-hash"]

    def serve(command: list[str], environment: dict[str, str] | None = None) -> tuple[subprocess.Popen[str], str]:
        environment = {**os.environ, **(environment or {})}
        service = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment)
        stack.callback(service.kill)
        assert service.stdout is not None
        return service, service.stdout.readline().split()[1].rstrip(",")

    tcp, uri = serve(["-m", "penstock", "serve", *limits])
    unix, plain = serve(["-c", SERVE_UNIX, str(folder / "plain"), "serve", *limits])
    tuned, tuned_uri = serve(
        ["-c", SERVE_UNIX, str(folder / "tuned"), "serve", *limits], {"GRPC_EXPERIMENTS": EXPERIMENTS}
    )
    return [
        Transport("shared memory", tcp, Address.of(uri), True),
        Transport("shared memory, 2 MB", tcp, Address.of(uri), True, 2 << 20),
        Transport("TCP", tcp, Address.of(uri), False),
        Transport("TCP, 2 MB", tcp, Address.of(uri), False, 2 << 20),
        Transport("UNIX socket", unix, UnixAddress(plain), False),
        Transport("UNIX socket, 2 MB", unix, UnixAddress(plain), False, 2 << 20),
        Transport("UNIX socket, 2 MB, tuned", tuned, UnixAddress(tuned_uri), False, 2 << 20, tuple(TUNED)),
    ]


def compare(transports: list[Transport], clients: list[Client], rows: int, num_frames: int, repeats: int) -> None:
    rng = np.random.default_rng(0)
    frames = []
    for _ in range(num_frames):
        gradient = pa.FixedSizeListArray.from_arrays(rng.standard_normal(rows * DIM, dtype=np.float32), DIM)
        frames.append(pa.record_batch({"id": rng.zipf(1.1, rows) % VOCABULARY, "gradient": gradient}))
    num_bytes = sum(frame.nbytes for frame in frames)
    seconds: list[list[float]] = [[] for _ in transports]
    cpu_seconds: list[list[float]] = [[] for _ in transports]
    for repeat in range(-1, repeats):  # the first warms up
        for i in range(len(transports)):
            each = (i + repeat) % len(transports)
            put_frames.MESSAGE_BYTES = transports[each].message_bytes
            began, cpu = time.perf_counter(), cpu_s(transports[each].service)
            ack = clients[each].put(frames, "bench")
            took = time.perf_counter() - began
            assert ack.applied == num_frames
            if repeat >= 0:
                seconds[each].append(took)
                cpu_seconds[each].append(cpu_s(transports[each].service) - cpu)
    print(f"{num_frames} frames of {rows} rows, {num_bytes / num_frames / 1e6:.1f} MB each, {repeats} repeats")
    print("                            GB/s  (least to most)   CPU s  shared memory is faster by (least to most)")
    for each, transport in enumerate(transports):
        rates = [num_bytes / 1e9 / s for s in seconds[each]]
        ratios = [s / shared for s, shared in zip(seconds[each], seconds[0], strict=True)]
        print(
            f"{transport.name:26}{statistics.median(rates):6.2f}  ({min(rates):.2f} to {max(rates):.2f})"
            f"{statistics.median(cpu_seconds[each]):10.2f}"
            f"{statistics.median(ratios):8.2f}  ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


def cpu_s(service: subprocess.Popen[str]) -> float:
    """Return the CPU seconds of a service and of this process."""
    fields = Path(f"/proc/{service.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + time.process_time()


if __name__ == "__main__":
    main()
