"""Does a replay in passes stay below its limit of memory, and what does it cost? On Linux; writes the table to disk.

Memory: `penstock replay --passes auto` of one table with Adagrad, ``--times`` as large as the limit on the memory of
the process (RLIMIT_DATA). The peak is that of resident memory without pages of files. The allocators must not reserve
more than they use: the command runs with ARROW_DEFAULT_MEMORY_POOL=system and stacks of 1 MB.

Time: the replay of a log in K passes, next to K times reading it and one ordinary replay with a checkpoint, less its
own reading. Both are measured here, in turns; the best of ``--rounds``.

    python bench/experiments/passes.py [--limit-mb 400] [--times 4] [--passes 4] [--rounds 3]

The exit code is 1 if the peak exceeds the limit, or the time 1.25 times the sum.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config.embedding import EmbeddingConfig
from penstock.engine import Engine
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.synth import SynthOptions, write_synthetic
from penstock.passes.multi_pass import MultiPass, PassOptions

DIM, MOST = 32, 1.25
ROW_BYTES = 2 * 4 * DIM


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-mb", type=int, default=400)
    parser.add_argument("--times", type=int, default=4, help="the table, in limits")
    parser.add_argument("--passes", type=int, default=4, help="of the measurement of time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-passes-") as folder:
        fits = memory(Path(folder), args.limit_mb << 20, args.times)
    with tempfile.TemporaryDirectory(prefix="penstock-passes-") as folder:
        cheap = cost(Path(folder), args.passes, args.rounds, args.steps)
    return 0 if fits and cheap else 1


def files(folder: Path, rows: int, steps: int, rows_per_step: int) -> tuple[Path, Path]:
    """Write a configuration and a log; return their paths."""
    options = SynthOptions(rows=steps * rows_per_step, rows_per_step=rows_per_step, vocabulary=rows, dim=DIM)
    written = write_synthetic(folder / "log.arrows", options)
    return written.config, written.log


def memory(folder: Path, limit: int, times: int) -> bool:
    """Return whether a replay under the limit stays below it."""
    config, log = files(folder, times * limit // ROW_BYTES, 20, 20_000)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    words = ["replay", config, log, "--passes", "auto", "--checkpoint", folder / "c", "--json"]
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *map(str, words)],
        stdout=subprocess.PIPE,
        env=environment,
        preexec_fn=limited,
    )
    peak = 0
    while process.poll() is None:
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = max(peak, int(next(line.split()[1] for line in lines if line.startswith("RssAnon:"))) << 10)
        time.sleep(0.02)
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.read() or "{}")
    seconds = time.perf_counter() - began
    print(f"limit     {limit / 1e6:.0f} MB, table {times * limit / 1e6:.0f} MB, exit code {process.returncode}")
    print(f"peak      {peak / 1e6:.0f} MB without pages of files, {found.get('passes')} passes, {seconds:.0f} s")
    return process.returncode == 0 and peak <= limit


def cost(folder: Path, passes: int, rounds: int, steps: int) -> bool:
    """Return whether a replay in passes takes at most MOST times as long as its reads and one update."""
    path, log = files(folder, 2_000_000, steps, 100_000)
    config = EmbeddingConfig.load(path)

    def read() -> None:
        for frame in FrameReader([str(log)], ReadOptions(config.id_ranges)):
            frame.audited()

    def once() -> None:
        Engine(config).run([str(log)], checkpoint=folder / "once")

    def in_passes() -> None:
        MultiPass(config, [str(log)], None, PassOptions(passes=passes, checkpoint=folder / "c")).run()

    ways: dict[str, Callable[[], None]] = {"read": read, "once": once, "passes": in_passes}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - began)
            for made in ("once", "c"):
                shutil.rmtree(folder / made, ignore_errors=True)
    wanted = passes * best["read"] + best["once"] - best["read"]
    print(f"read      {best['read']:.2f} s; one replay with a checkpoint {best['once']:.2f} s")
    print(
        f"passes    {passes} in {best['passes']:.2f} s, {best['passes'] / wanted:.2f} of {passes} reads and one update"
    )
    return best["passes"] <= MOST * wanted


if __name__ == "__main__":
    sys.exit(main())
