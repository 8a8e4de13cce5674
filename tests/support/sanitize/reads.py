"""Reads rows from threads during the steps of threads that update them, for ThreadSanitizer to watch; see tsan.sh.

The copy of a row is the one function that reads what another thread may write (tsan_suppressions.txt): the seqlock of
the row's page says afterwards whether it counts. So it is checked here by what was copied: torn rows, rows of other
steps, and rows of other keys than the requested one.

--break seqlock updates rows without counting their pages, and must read a torn row.
"""

import sys
import tempfile
import threading
import time

import numpy as np
import shared_processes

from penstock.model.version import Version
from penstock.pyx import row_reads
from penstock.serving.shared.table_writer import SharedTable, SharedWriter

READERS, STEPS, LIMIT_S = 3, 150, 120


def main() -> int:
    broken = sys.argv[1:] == ["--break", "seqlock"]
    assert "tsan" in row_reads.__file__, f"not the sanitized build: {row_reads.__file__}"
    sys.setswitchinterval(1e-5)
    num_rows = updates(counts_pages=not broken)
    if not broken:
        num_rows += keys()
    assert not {"jax", "pyarrow"} & set(sys.modules)
    print(f"tsan: {num_rows:,} rows were read during their updates{', without counters' if broken else ''}")
    return 0


def updates(counts_pages) -> int:
    """Threads of a step update rows that several threads read."""
    with tempfile.TemporaryDirectory() as folder:
        writer = shared_processes.Writer(folder, counts_pages)
        is_over = threading.Event()
        watches = [shared_processes.Watch(folder, consistent=number == 0 and counts_pages) for number in range(READERS)]
        readers = [in_thread(watch.read, is_over) for watch in watches]
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s and writer.num_steps < STEPS * (1 if counts_pages else 1000):
            writer.run(10)
            if any(reader.error for reader in readers):
                break
        return finished(readers, is_over, watches)


def keys() -> int:
    """Keys take each other's rows while they are read; every row is its key, in all of its floats."""
    with tempfile.TemporaryDirectory() as folder:
        writer = SharedWriter(folder)
        writer.create([SharedTable("key", 48, 500, has_keys=True)])
        writer.publish(Version("0"))
        is_over, watches = threading.Event(), [KeyWatch(folder) for _ in range(READERS)]
        readers = [in_thread(watch.read, is_over) for watch in watches]
        rng, present = np.random.default_rng(1), np.zeros(0, np.int64)
        for step in range(1, STEPS):
            wanted = np.unique(rng.integers(1, KeyWatch.NUM_KEYS, 400))
            with writer.step(Version(str(step))):
                writer.remove("key", np.setdiff1d(present, wanted))
                writer.write("key", wanted, np.repeat(wanted, 48).reshape(-1, 48))
            present = wanted
        return finished(readers, is_over, watches)


class KeyWatch:
    """Reads keys, of which each is absent or has its row."""

    NUM_KEYS = 2000

    def __init__(self, folder):
        self.reader, self.num_rows = shared_processes.Reader(folder), 0

    def read(self):
        every = np.arange(1, self.NUM_KEYS)
        rows = self.reader.lookup("key", every, timeout_ms=60_000)
        assert ((rows == every[:, None]).all(axis=1) | (rows == 0).all(axis=1)).all(), "a row of another key"
        self.num_rows += len(rows)


class ReadingThread(threading.Thread):
    """Calls ``read`` until ``is_over``. error : that ended it"""

    def __init__(self, read, is_over):
        super().__init__(daemon=True)
        self.read, self.is_over, self.error = read, is_over, None

    def run(self):
        try:
            while not self.is_over.is_set():
                self.read()
        except BaseException as error:
            self.error = error


def in_thread(read, is_over):
    thread = ReadingThread(read, is_over)
    thread.start()
    return thread


def finished(readers, is_over, watches) -> int:
    """Return how many rows were read. Raises the error of a reader."""
    is_over.set()
    for reader in readers:
        reader.join()
    for reader in readers:
        if reader.error is not None:
            print(f"tsan: {reader.error}", file=sys.stderr)
            sys.exit(66)
    return sum(watch.num_rows for watch in watches)


if __name__ == "__main__":
    sys.exit(main())
