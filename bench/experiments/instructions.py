"""How many instructions does a step take on 1, 2, 8 and 32 threads?

For each number of threads two processes run under valgrind: one takes five steps, the other one; the difference are
four steps without the start. A step is one frame of 262,144 rows (w1 with a quarter of its ids: zipf 1.1 of 2,500,000,
dim 32, Adagrad) in batches of 32,768. Printed are instructions per row in all and by function. valgrind runs one thread
at a time, so what threads spend waiting for each other is counted as it happens to come; it stands under ``_work``.

    python bench/experiments/instructions.py --threads 1,2,8,32
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.api.engine import Engine
from penstock.bench.penstock_adapter import config_of
from penstock.bench.workloads import Step, make

STEPS = 5
WORKLOAD = replace(make("w1", 1 << 18, 0.25), num_steps=STEPS)


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("--threads", default="1,2,8,32", metavar="N,N")
    arguments.add_argument("--functions", type=int, default=16, metavar="N", help="print the N with most instructions")
    arguments.add_argument("--run", nargs=3, metavar=("DIR", "THREADS", "STEPS"), help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.run:
        run(Path(args.run[0]), *map(int, args.run[1:]))
        return 0
    rows = (STEPS - 1) * WORKLOAD.rows
    by_threads = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, step in enumerate(WORKLOAD.steps()):
            np.savez(Path(folder) / f"{number}.npz", ids=step.ids, values=step.values)
        for threads in args.threads.split(","):
            counts = counted(folder, threads, STEPS)
            counts.subtract(counted(folder, threads, 1))
            by_threads[threads] = counts
    first = next(iter(by_threads.values()))
    print("instructions per row" + "".join(f"{threads:>12}" for threads in by_threads), "threads")
    print("all" + " " * 17 + "".join(f"{counts.total() / rows:12.1f}" for counts in by_threads.values()))
    print("to the first" + " " * 8 + "".join(f"{c.total() / first.total():12.3f}" for c in by_threads.values()))
    most = sorted(set().union(*by_threads.values()), key=lambda name: -max(c[name] for c in by_threads.values()))
    for name in most[: args.functions]:
        print("".join(f"{counts[name] / rows:12.2f}" for counts in by_threads.values()), name)
    return 0


def run(folder: Path, threads: int, num_steps: int) -> None:
    """Take so many steps."""
    steps = []
    for number in range(STEPS):  # all, so that the processes differ by the steps alone
        with np.load(folder / f"{number}.npz") as arrays:
            steps.append(Step(WORKLOAD, arrays["ids"], arrays["values"]))
    engine = Engine(config_of(WORKLOAD, "adagrad"), threads=threads)
    batches: list[pa.RecordBatch] = [batch for step in steps[:num_steps] for batch in step.batches]
    report = engine.run(iter(batches), contribution_rows=WORKLOAD.rows)
    assert report.steps == num_steps, report


def counted(folder: str, threads: str, steps: int) -> Counter[str]:
    """Run a process under callgrind. Return the instructions of each function."""
    out = Path(folder) / "callgrind.out"
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", sys.executable, __file__]
    # Idle threads of a linear algebra library spin.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [*command, "--run", folder, threads, str(steps)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    function, of_call = "", False
    for line in out.read_text(errors="replace").splitlines():
        if match := re.match(r"(c?fn)=\((\d+)\)(?: (.*))?", line):
            kind, number, name = match.groups()
            names.setdefault(number, re.sub(r"^__pyx_f_\d+penstock_\d+pyx_\d+", "", name or ""))
            function = names[number] if kind == "fn" else function
        elif line.startswith("calls="):
            of_call = True  # the next line has what the callee took
        elif line[:1].isdigit() or line[:1] in ("+", "-", "*"):
            if not of_call:
                counts[function] += int(line.split()[1])
            of_call = False
    return counts


if __name__ == "__main__":
    sys.exit(main())
