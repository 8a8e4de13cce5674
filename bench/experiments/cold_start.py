"""How long does a command take to start? ``penstock --help`` and a replay of an empty log, next to ``import jax``.

All take turns, each a separate process with a warm page cache and a warm compile cache (in a temporary folder); the
first round warms up and does not count. The output is median, minimum and maximum, and the ratio of the medians.

    python bench/experiments/cold_start.py --rounds 11
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa

CONFIG = """
table_descriptor {
  name: "user" vocabulary_size: 1000 dimension: 16
  optimization_parameters { adagrad {} learning_rate { constant: 0.1 } gradient_accumulation_status: ENABLED }
}
mode: TRAINING
"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("--rounds", type=int, default=11)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "tables.pbtxt").write_text(CONFIG)
        schema = pa.schema([("id", pa.int64()), ("gradient", pa.list_(pa.float32(), 16))])
        pa.ipc.new_stream(str(place / "log.arrows"), schema).close()
        penstock = [sys.executable, "-m", "penstock"]
        replay = [*penstock, "replay", str(place / "tables.pbtxt"), str(place / "log.arrows")]
        commands = {
            "import jax": [sys.executable, "-c", "import jax"],
            "import jax, devices": [sys.executable, "-c", "import jax; jax.devices()"],
            "penstock --help": [*penstock, "--help"],
            "penstock replay --help": [*penstock, "replay", "--help"],
            "penstock replay, empty log": replay,
        }
        environment = os.environ | {"PENSTOCK_COMPILE_CACHE": str(place / "cache")}
        times: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(args.rounds + 1):
            for name, command in commands.items():
                seconds = timed(command, environment)
                if number:
                    times[name].append(seconds)
    print(f"machine   {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    base = statistics.median(times["import jax"])
    for name, of in times.items():
        middle = statistics.median(of)
        print(f"{name:27} {middle * 1e3:6.0f} ms ({min(of) * 1e3:.0f}–{max(of) * 1e3:.0f})  {middle / base:.2f}")


def timed(command: list[str], environment: dict[str, str]) -> float:
    """Return the seconds of a process, from its start to its end."""
    started = time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
