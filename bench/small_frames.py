"""Frames of 100 rows from a file, next to pyarrow reading and validating the same file; and the start of a replay.

The cases ``frames`` and ``startup`` of ``penstock bench``. ``python -P bench/small_frames.py`` prints the same for the
penstock on its path, which may be an earlier version.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from penstock.bench import machine
from penstock.bench.contestants import Runner
from penstock.bench.distributions import zipf
from penstock.bench.interleave import take_turns
from penstock.bench.penstock_adapter import Latency, Ours, Update, config_of, write_file
from penstock.bench.workloads import Step, Workload, one_table

FRAMES, SHORT_FRAMES = 100_000, 2_000


class SmallFrames(Update):
    """``Engine.run`` over a file, an Arrow IPC stream of many frames. Each step is a frame and a record batch."""

    def __init__(self, workload: Workload, steps: Sequence[Step], threads: int, path: Path, frames: int) -> None:
        super().__init__(workload, "adagrad", steps, threads)
        self._path, self._frames = path, frames
        with pa.ipc.new_stream(str(path), steps[0].batches[0].schema) as writer:
            for number in range(frames):
                writer.write_batch(steps[number % len(steps)].batches[0])

    def run(self, steps: Sequence[int]) -> None:
        self._apply(str(self._path), self._frames)


class BareConsumer(Ours):
    """pyarrow, which reads the same file and validates every batch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def run(self, steps: Sequence[int]) -> None:
        with pa.memory_map(str(self._path)) as file, pa.ipc.open_stream(file) as reader:
            for batch in reader:
                batch.validate(full=True)


class PythonProcess(Ours):
    """A Python process from its start to its end."""

    def __init__(self, *words: str) -> None:
        self._command = [sys.executable, *words]

    def run(self, steps: Sequence[int]) -> None:
        subprocess.run(self._command, check=True, stdout=subprocess.DEVNULL)


def frames_sides(steps: Sequence[Step], threads: int, folder: Path, frames: int) -> dict[str, Runner]:
    ours = SmallFrames(steps[0].workload, steps, threads, folder / "frames.arrows", frames)
    return {"penstock": ours, "bare_consumer": BareConsumer(folder / "frames.arrows")}


def startup_sides(step: Step, folder: Path) -> dict[str, Runner]:
    """Return a replay of a log without rows, and the import of jax."""
    config_of(step.workload, "adagrad").save(folder / "tables.pbtxt")
    write_file(folder / "empty.arrow", iter([step.batches[0].slice(0, 0)]))
    words = ("-m", "penstock", "replay", str(folder / "tables.pbtxt"), str(folder / "empty.arrow"), "--no-hash")
    return {"penstock": PythonProcess(*words), "import_jax": PythonProcess("-c", "import jax")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=FRAMES)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(machine.named(machine.describe()))
    steps = one_table("frames", "frames of 100 rows", 1_000_000, 16, 100, zipf(1.1), 64).steps()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small: dict[str, Runner] = {how: Latency(steps[0].workload, steps, 1, how) for how in ("run", "apply", "bare")}
        for title, sides, num_steps in (
            ("a step of 100 rows", small, len(steps)),
            ("a frame of 100 rows of a file", frames_sides(steps, 1, folder, args.frames), args.frames),
            ("start-up", startup_sides(steps[0], folder), 1),
        ):
            for side, timing in take_turns(sides, num_steps, args.rounds).items():
                least = min(sample.ms for sample in timing.clean)
                print(f"{title:32} {side:16} median {1e3 * timing.median_ms:12.1f} µs, least {1e3 * least:12.1f}")


if __name__ == "__main__":
    main()
