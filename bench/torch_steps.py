"""A training step of penstock.torch next to torch's own sparse step, in process and over loopback.

A step is a forward pass of 26 bags of one id each per sample, the backward pass of a sum of squares, and Adagrad. Peers
take turns. torch: 26 ``nn.EmbeddingBag(sparse=True)`` and ``optim.Adagrad``. engine: an EmbeddingBagCollection over an
engine of this process. service: over ``penstock serve`` in a process on the same CPUs. transfers: what penstock adds to
torch's passes in that step, distinct ids, pull and push, with the rows as gradients. bare: a DoExchange that answers
rows of the same size, and a DoPut of the same bytes, into a server that discards what it reads.

``python -m penstock.bench.torch_steps`` prints medians and ratios; it shows neither a GPU nor a network.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import torch

import penstock.contrib.torch as pt
from penstock.api.engine import Engine
from penstock.bench import machine
from penstock.bench.distributions import uniform, zipf
from penstock.bench.doput import SERVE, started
from penstock.bench.interleave import take_turns
from penstock.contrib.torch.pulled_rows import planned
from penstock.contrib.torch.stores import Block
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import TableConfig
from penstock.model.updates import Adagrad

TABLES, BATCH, DIM, VOCABULARY = 26, 4096, 32, 100_000
STEPS = 4
RATE = 0.05
ECHO = [sys.executable, "-m", "penstock.bench.torch_steps", "--echo"]
NAMES = [f"t{number}" for number in range(TABLES)]


@dataclass
class BagConfig:
    """As torchrec's EmbeddingBagConfig."""

    name: str
    feature_names: list[str]
    num_embeddings: int = VOCABULARY
    embedding_dim: int = DIM
    pooling: str = "SUM"


@dataclass
class Steps:
    """A contestant. step : trains on one batch"""

    step: Callable[[Any], None]
    batches: Sequence[Any]

    def prepare(self, steps: Sequence[int]) -> None:
        """Do nothing."""

    def run(self, steps: Sequence[int]) -> None:
        for number in steps:
            self.step(self.batches[number])


def torchs_step() -> Callable[[Any], None]:
    bags = torch.nn.ModuleDict(
        {name: torch.nn.EmbeddingBag(VOCABULARY, DIM, mode="sum", sparse=True) for name in NAMES}
    )
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=RATE, initial_accumulator_value=0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        pooled = torch.cat([bags[name](values, offsets[:-1]) for name, (values, offsets) in batch.items()], 1)
        pooled.square().sum().backward()
        optimizer.step()

    return step


def our_step(store: pt.Store) -> Callable[[Any], None]:
    bags = pt.EmbeddingBagCollection(tables=[BagConfig(name, [name]) for name in NAMES], store=store)
    optimizer = pt.Step(bags)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        bags(batch).values().square().sum().backward()
        optimizer.step()

    return step


def transfers_step(store: pt.Store) -> Callable[[Any], None]:
    def step(batch: Any) -> None:
        ids, _ = planned({name: values.numpy() for name, (values, _) in batch.items()})
        pulled = store.pull(ids)
        store.push([Block(ids, np.concatenate(list(pulled.rows.values())))], pulled.version.step)

    return step


def request_of(batch: Any) -> pa.RecordBatch:
    """Return the distinct ids of a batch as a request."""
    distinct = [np.unique(values.numpy()) for values, _ in batch.values()]
    codes = np.repeat(np.arange(TABLES, dtype=np.int32), [len(ids) for ids in distinct])
    table = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(NAMES))
    return pa.RecordBatch.from_pydict({"table": table, "ids": pa.array(np.concatenate(distinct))})


def bare_step(address: str, batches: Sequence[Any]) -> Callable[[Any], None]:
    """Return a step of two bare transfers: ids out and rows in, gradients out."""
    requests = {id(batch): request_of(batch) for batch in batches}
    client = flight.connect(address)
    # A stream for each that stays open, as the service's client has.
    asking, answers = client.do_exchange(flight.FlightDescriptor.for_path("rows"))
    putting = messages = None

    def step(batch: Any) -> None:
        nonlocal putting, messages
        request = requests[id(batch)]
        if putting is None:
            asking.begin(request.schema)
        asking.write_batch(request)
        rows = answers.read_chunk().data["row"]
        table, ids = request.columns
        frame = pa.RecordBatch.from_pydict({"table": table, "step": ids, "id": ids, "gradient": rows})
        if putting is None:
            putting, messages = client.do_put(flight.FlightDescriptor.for_path("put"), frame.schema)
        putting.write_batch(frame)
        messages.read()  # the server's message after the batch

    return step


class Servers:
    """Both processes end with it."""


class Echo(flight.FlightServerBase):  # type: ignore[misc]
    """Answers ids with rows of zeros, and every batch of a put with one message."""

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        zeros = pa.array(np.zeros(TABLES * BATCH * DIM, np.float32))
        writer.begin(pa.schema([("row", pa.list_(pa.float32(), DIM))]))
        for chunk in reader:
            rows = pa.FixedSizeListArray.from_arrays(zeros[: chunk.data.num_rows * DIM], DIM)
            writer.write_batch(pa.RecordBatch.from_arrays([rows], ["row"]))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        for _ in reader:
            writer.write(b"read")


def batches_of(draw: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    offsets = torch.arange(BATCH + 1)
    return [{name: (torch.from_numpy(draw(rng, BATCH, VOCABULARY)), offsets) for name in NAMES} for _ in range(STEPS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.echo:
        with Echo("grpc://127.0.0.1:0") as server:
            print(f"at grpc://127.0.0.1:{server.port}", flush=True)
            server.serve()
        return
    torch.set_num_threads(flags.threads)
    torch.sparse.check_sparse_tensor_invariants.disable()
    print(machine.named(machine.describe()))
    print(machine.versions(["torch"]))
    print(f"{TABLES} tables of {VOCABULARY:,} rows, dim {DIM}, batch {BATCH}; {flags.threads} threads")
    tables = [TableConfig(VOCABULARY, DIM, name=name) for name in NAMES]
    config = EmbeddingConfig.from_tables(tables, Adagrad(RATE))
    for name, draw in (("uniform", uniform), ("zipf", zipf(1.05))):
        batches = batches_of(draw)
        with tempfile.TemporaryDirectory() as folder:
            config.save(Path(folder) / "tables.pbtxt")
            serve = [*SERVE, f"{folder}/tables.pbtxt", "--threads", str(flags.threads), "--no-hash"]
            servers = Servers()
            address, bare = (started(servers, command, Path(folder) / "log.txt") for command in (serve, ECHO))
            steps = {
                "torch": torchs_step(),
                "engine": our_step(pt.store(Engine(config, threads=flags.threads))),
                "bare": bare_step(bare, batches),
                "service": our_step(pt.store(address, contributor="steps")),
                "transfers": transfers_step(pt.store(address, contributor="transfers")),
            }
            timings = take_turns({side: Steps(step, batches) for side, step in steps.items()}, STEPS, flags.rounds)
        medians = {side: timing.median_ms for side, timing in timings.items()}
        for side, timing in timings.items():
            spread = timing.as_json()
            print(f"{name:8} {side:9} {medians[side]:8.1f} ms ({spread['min_ms']:.1f} to {spread['max_ms']:.1f})")
        for side, other in (("engine", "torch"), ("service", "torch"), ("transfers", "bare")):
            print(f"{name:8} {side} / {other} {medians[side] / medians[other]:.2f}")


if __name__ == "__main__":
    main()
