"""Shuffle logs by owner once, then replay every share by itself: no process ever talks to another.

    python examples/shuffle_by_owner.py tables.pbtxt 4 out a.arrows b.arrows

``partition`` is a map function: one log in, one file per share out. Any engine that maps (Spark, Beam, Dask, a pool of
processes, as here) can run it where the logs are. ``replay`` then needs the files of one share alone, on any machine.
Frames are in rounds over the logs, as with ``penstock replay --merge round``.
"""

import heapq
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa

import penstock as ps
from penstock.contrib.shares import Router, WholeTables, frames_of
from penstock.core.observers import Context
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.model.frames import FrameRun
from penstock.model.learning_rates import LearningRates
from penstock.model.stats import Counters

FRAMES_PER_BLOCK = 16


def partition(config_file, count, out, log, number):
    """Write the blocks of one log for every share: ``out/SHARE-NUMBER``. number : of the log, in the order of rounds"""
    config = ps.EmbeddingConfig.load(config_file)
    frames = iter(FrameReader(log, ReadOptions(config.id_ranges)))
    router, first = Router(config, count), 0
    files = [open(Path(out) / f"{rank}-{number}", "wb") for rank in range(count)]  # noqa: SIM115
    while block := list(islice(frames, FRAMES_PER_BLOCK)):
        heads, batches = router.block(block)
        for file, batch in zip(files, batches, strict=True):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
            pickle.dump((first, heads, sink.getvalue().to_pybytes()), file)
        first += len(block)
    for file in files:
        file.close()


def replay(config, rank, count, out, num_logs, **engine):
    """Return the engine of one share after all of its frames."""
    share = ps.Engine(config, share=(rank, count), **engine)
    dims = {spec.name: spec.dim for spec in config.tables}
    context = Context(LearningRates(0, None, {}), Counters())
    logs = [_frames(Path(out) / f"{rank}-{number}", number, dims) for number in range(num_logs)]
    for _, _, frame in heapq.merge(*logs, key=lambda entry: entry[:2]):
        share.core.push(FrameRun.of(frame), context).check()
    share.flush()
    return share


def _frames(path, number, dims):
    """Yield (round, number of the log, frame)."""
    with open(path, "rb") as file:
        while file.peek(1):
            first, heads, data = pickle.load(file)
            with pa.ipc.open_stream(data) as stream:
                (batch,) = stream
            for index, frame in enumerate(frames_of(heads, batch, dims)):
                yield first + index, number, frame


def shuffle(config_file, count, out, logs):
    """Partition all logs, each in a process."""
    Path(out).mkdir(exist_ok=True)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        done = [pool.submit(partition, config_file, count, out, log, number) for number, log in enumerate(logs)]
    for partitioned in done:
        partitioned.result()


def main(config_file, count, out, *logs):
    config, count = ps.EmbeddingConfig.load(config_file), int(count)
    shuffle(config_file, count, out, logs)
    shares = [replay(config, rank, count, out, len(logs)) for rank in range(count)]
    tables = WholeTables(config, [share.core.tables for share in shares])
    print(tables.hash(shares[0].global_step))


if __name__ == "__main__":
    main(*sys.argv[1:])
