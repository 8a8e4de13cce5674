"""The cost of the checksums of penstock's log: MB/s of writing and reading, with and without them, the best of 5.

    python bench/experiments/log_cost.py [ROWS_PER_BATCH]

2 million rows of dim 32 (288 MB) in the page cache, on one thread.
"""

import io
import sys
import tempfile
import time
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.log import LogWriter
from penstock.io.sources.opening import open_source
from penstock.io.synth import SynthOptions, write_synthetic

IDS, DIM = 1_000_000, 32


class Nowhere(io.RawIOBase):
    def writable(self):
        return True

    def write(self, data):
        return len(data)


def write_plain(sink, batches):
    with pa.ipc.new_stream(sink, batches[0].schema.remove_metadata()) as writer:
        for batch in batches:
            writer.write_batch(batch)


def write_log(sink, batches):
    with LogWriter(sink, batches[0].schema) as log:
        for batch in batches:
            log.write(batch)


def read_batches(source):
    for part in open_source(source).parts():
        for _ in part.batches(part.schema.names):
            pass


def read_frames(source):
    for _ in FrameReader(source, ReadOptions({"table_0": (IDS, DIM)})):
        pass


def read_open_file(path):
    with open(path, "rb") as file:
        read_batches(file)


def main(rows_per_batch):
    with tempfile.TemporaryDirectory() as folder:
        log, plain, out = (Path(folder) / name for name in ("log.arrows", "plain.arrows", "out"))
        write_synthetic(log, SynthOptions(rows=2_000_000, rows_per_step=rows_per_batch, dim=DIM, vocabulary=IDS))
        batches = [batch for batch in pa.ipc.open_stream(log).read_all().to_batches() if batch.num_rows]
        write_plain(str(plain), batches)
        content = log.read_bytes()

        def best(what):
            seconds = []
            for _ in range(5):
                started = time.perf_counter()
                what()
                seconds.append(time.perf_counter() - started)
            return f"{len(content) / 1e6 / min(seconds):10,.0f} MB/s {min(seconds) * 1e3:6.0f} ms"

        def to_file(write):
            with open(out, "wb") as file:
                write(file, batches)

        print(f"{len(content) / 1e6:.0f} MB in {len(batches)} batches")
        print(f"zlib.crc32 alone            {best(lambda: zlib.crc32(content))}")
        for name, write in (("plain", write_plain), ("log", write_log)):
            print(f"write to nowhere, {name:9} {best(lambda write=write: write(Nowhere(), batches))}")
            print(f"write to a file, {name:9}  {best(lambda write=write: to_file(write))}")
        for what, read in (("mapped", read_batches), ("open file", read_open_file), ("frames", read_frames)):
            for name, path in (("plain", plain), ("log", log)):
                print(f"read {what + ', ' + name:22} {best(lambda read=read, path=path: read(path))}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 65_536)
