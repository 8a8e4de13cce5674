"""``python tests/support/weekly.py``: every check, whole, one after the other, for ``make weekly``.

.ci/run takes turns at a part of them (ROTATION), and leaves out those of hours. Adds a line with the CPU seconds of
each to bench/results/weekly.md; a release needs one of the last seven days that passed (release_check.py).
Exit code 1: a check failed. Its output is in build/weekly. Arguments select checks, and add no line.
"""

import datetime
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "weekly.md"
LOGS = ROOT / "build" / "weekly"
MOST_DAYS = 7
PASSED = "all passed"

CHECKS = {
    "test": ["test"],
    "evidence": ["evidence", "EVIDENCE=long"],
    "neighbours": ["neighbours"],
    "lint": ["lint", "types", "docs"],
    "checked": ["checked"],
    "sanitize": ["sanitize"],
    "tsan": ["tsan"],
    "tpu": ["tpu-small"],
    "gpu": ["gpu-aot"],
    "faults": ["faults"],
    "fuzz": ["fuzz"],
    "follow-histories": ["follow-histories"],
    "cluster": ["cluster"],
    "mutations": ["mutations"],
}


def run(check: str) -> tuple[int, float, float]:
    """Run a check. Returns its exit code, its seconds and its CPU seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "ROTATION"}
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with open(LOGS / f"{check}.log", "w") as log:
        command = ["make", *CHECKS[check]]
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return code, time.monotonic() - start_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(*selected: str) -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    failed, seconds = [], []
    for check in selected or CHECKS:
        code, wall_s, cpu_s = run(check)
        print(f"{check}: exit code {code}, {wall_s:.0f} s, {cpu_s:.0f} CPU s", flush=True)
        seconds.append(f"{check} {cpu_s:.0f}")
        failed += [check] * (code != 0)
    if not selected:
        commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, text=True).strip()
        outcome = f"failed: {', '.join(failed)}" if failed else PASSED
        with open(RESULTS, "a") as results:
            results.write(f"| {datetime.date.today()} | {commit} | {outcome} | {', '.join(seconds)} |\n")
    return 1 if failed else 0


def days_since_passed(text: str, today: datetime.date) -> int | None:
    """Return how many days ago all checks passed, by the lines of RESULTS. None: never."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    dates = [datetime.date.fromisoformat(row[1]) for row in rows if len(row) > 3 and row[3] == PASSED]
    return (today - max(dates)).days if dates else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
