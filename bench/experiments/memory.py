"""Does the memory of ``penstock replay`` grow with the length of the log?

For each length, the experiment writes a synthetic log (one table, dim 32, 1 million ids, zipf 1.1, 100,000 rows a step)
and replays it in a separate process, with --no-hash and without --out: the main path alone. It prints the peak of each,
and the peak of the last quarter of the process's lifetime ("late"), which shows growth even if the start needs more
than the replay; then the ratios of the longest log to the shortest. The exit code is 1 if one is above 1.10.

It measures RssAnon: memory that the process allocated and touched. The peak that the system reports at the end
(ru_maxrss, VmHWM) also counts the pages of the memory-mapped log: the kernel keeps them until it needs the memory, so
that peak grows with the log, whatever the program does. The pages of mapped files are printed as "file". RssAnon has no
high-water mark: it is sampled every 20 ms, and a shorter peak may be missed. Linux only: it reads /proc.

    python bench/experiments/memory.py --rows 2000000,10000000
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock.bench import machine
from penstock.io.synth import SynthOptions, write_synthetic

SAMPLE_S = 0.02
LIMIT = 1.10


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("--rows", type=lengths, default=[2_000_000, 10_000_000], metavar="N,N", help="of the logs")
    arguments.add_argument("--dir", type=Path, help="folder for the logs; existing logs are used")
    arguments.add_argument("--json", action="store_true", help="one JSON object instead of text")
    args = arguments.parse_args()
    if not sys.platform.startswith("linux"):
        print("memory.py: needs Linux: RssAnon is read from /proc/PID/status", file=sys.stderr)
        return 2
    say = (lambda *_, **__: None) if args.json else print
    environment = machine.describe() | machine.versions(["penstock"])
    for name, value in environment.items():
        say(f"{name:12} {value}")
    say(f"\n{'rows':>12} {'peak anon MB':>13} {'late anon MB':>13} {'peak file MB':>13} {'seconds':>8} {'rows/s':>10}")
    if args.dir is not None:
        args.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        runs = []
        for rows in args.rows:
            run = measure(rows, args.dir or Path(temporary))
            runs.append(run)
            say(
                f"{run['rows']:12,} {run['peak_anon_mb']:13.1f} {run['late_anon_mb']:13.1f} "
                f"{run['peak_file_mb']:13.1f} {run['seconds']:8.2f} {run['rows_per_s']:10,.0f}",
                flush=True,
            )
    peak, late = (runs[-1][key] / runs[0][key] for key in ("peak_anon_mb", "late_anon_mb"))
    flat = max(peak, late) <= LIMIT
    say(f"\n{runs[-1]['rows'] / runs[0]['rows']:g} times the rows, {peak:.3f} times the peak, ", end="")
    say(f"{late:.3f} times the late peak (limit {LIMIT:.2f}): {'does not grow' if flat else 'GROWS'}")
    if args.json:
        ratios = {"peak_ratio": peak, "late_ratio": late, "limit": LIMIT, "flat": flat}
        print(json.dumps({"machine": environment, "runs": runs, **ratios}))
    return 0 if flat else 1


def lengths(text: str) -> list[int]:
    """Return the lengths of ``2000000,10000000``, the shortest first."""
    try:
        rows = sorted(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers of rows such as 2000000,10000000, got '{text}'") from None
    if len(rows) < 2 or rows[0] < 1:
        raise argparse.ArgumentTypeError(f"expected two or more numbers of at least 1, got '{text}'")
    return rows


def measure(rows: int, directory: Path) -> dict[str, Any]:
    """Replay a log of ``rows`` rows; return its memory in MB (10^6 bytes), and the seconds that replay reports."""
    log, config = log_of(rows, directory)
    command = [sys.executable, "-m", "penstock", "replay", str(config), str(log), "--no-hash", "--json"]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=output, stderr=errors)
        anon, file = watch(child)
        output.seek(0)
        errors.seek(0)
        if child.returncode:
            raise SystemExit(f"memory.py: replay failed with exit code {child.returncode}: {errors.read().strip()}")
        report = json.load(output)
    if report["rows"] != rows:
        raise SystemExit(f"memory.py: the log has {report['rows']} rows instead of {rows}")
    return {
        "rows": rows,
        "peak_anon_mb": max(anon) / 1e6,
        "late_anon_mb": max(anon[len(anon) * 3 // 4 :]) / 1e6,
        "peak_file_mb": max(file) / 1e6,
        "seconds": report["seconds"],
        "rows_per_s": report["rows_per_s"],
        "steps": report["steps"],
    }


def log_of(rows: int, directory: Path) -> tuple[Path, Path]:
    """Return a log and its configuration, written on first use. A rename ends the write: an existing log is whole."""
    log = directory / f"memory-{rows}.arrows"
    config = log.with_suffix(".pbtxt")
    if not (log.exists() and config.exists()):
        write_synthetic(log, SynthOptions(rows=rows, rows_per_step=100_000, vocabulary=1_000_000, dim=32, alpha=1.1))
    return log, config


def watch(child: subprocess.Popen[Any]) -> tuple[list[int], list[int]]:
    """Return samples of RssAnon and RssFile of a process until it ends, in bytes."""
    anon, file = [0], [0]
    while child.poll() is None:
        now = resident(child.pid)
        if now:
            anon.append(now["RssAnon"])
            file.append(now["RssFile"])
        time.sleep(SAMPLE_S)
    return anon, file


def resident(pid: int) -> dict[str, int]:
    """Return RssAnon and RssFile in bytes; empty if the process has just exited."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except ProcessLookupError:
        return {}
    fields = (line.split() for line in lines if line.startswith(("RssAnon:", "RssFile:")))
    return {name.rstrip(":"): 1024 * int(kilobytes) for name, kilobytes, _ in fields}


if __name__ == "__main__":
    sys.exit(main())
