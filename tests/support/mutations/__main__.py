"""``python -m mutations``: 30 small changes to the code; the tests of their packages must notice at least 27, by those
of ``make test`` alone, and the others by their evidence.

The mutations are drawn with a kept seed, the same number from every package of packages.py, from all that operators.py
can make of the package's modules. A mutation in equivalent.txt changes nothing that a test could notice; the next one
of the draw takes its place. Each is applied to a copy of the repository and tested with a limit of 60 s, multiplied by
the machine's load per CPU. Outcomes:

    caught        a test of ``make test`` failed, or the tests did not end within the limit
    evidence      only a test of ``make evidence`` did
    SURVIVED      every test passed

Results are kept in build/mutations while neither the package's modules nor its test files change, so that an
interrupted command continues. The table is written to results.txt. Exit code 1 if fewer than 27 of 30 are caught, or
if one survived.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutations.operators import Mutation
from mutations.packages import PACKAGES, ROOT, all_mutations, modules_of, selected_tests
from mutations.working_copy import WorkingCopy

SEED = 19
PER_PACKAGE = 5
MUST_CATCH = 27
LIMIT_S, EVIDENCE_LIMIT_S = 60, 1800
NO_TESTS = 5  # exit code of pytest
HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutations", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", metavar="NAME", help="a package, or the key of a mutation; writes no results.txt")
    parser.add_argument("--list", action="store_true", help="print what is drawn, and run nothing")
    parser.add_argument("--again", action="store_true", help="also run what has a result in build/mutations")
    args = parser.parse_args()
    equivalent = read_equivalent()
    if args.list:
        for package in PACKAGES:
            for mutation in draw(package, equivalent):
                print(f"{package:10}  {described(mutation)}")
        return 0
    with tempfile.TemporaryDirectory(prefix="penstock-mutations-") as folder:
        copy = WorkingCopy(Path(folder))  # all is read from it: the repository may change meanwhile
        rows = [row for package in PACKAGES for row in run(copy, package, equivalent, args.only, args.again)]
    caught, total = sum(row["caught"] for row in rows), len(rows)
    table = [format_row(row) for row in rows]
    table += [f"equivalent  {key}  {reason}" for key, reason in equivalent.items()]
    survived = sum(not row["caught"] and not row["by"] for row in rows)
    others = f", {total - caught - survived} by evidence alone" if caught + survived < total else ""
    summary = f"{caught} of {total} caught{others} (seed {SEED}, {PER_PACKAGE} of each package)"
    print(*table, summary, sep="\n")
    if args.only is None:
        (HERE / "results.txt").write_text("\n".join([heading(), *table, summary]) + "\n")
    return 1 if survived or total - caught > PER_PACKAGE * len(PACKAGES) - MUST_CATCH else 0


def heading() -> str:
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    return f"# make mutations, commit {commit}, Python {platform.python_version()}, limit {LIMIT_S} s x load"


def read_equivalent() -> dict[str, str]:
    """Return key → reason of the mutations that change nothing. Exits if the code no longer has one of them."""
    lines = (HERE / "equivalent.txt").read_text().splitlines()
    reasons = dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    gone = reasons.keys() - {mutation.key for package in PACKAGES for mutation in all_mutations(package)}
    if gone:
        sys.exit(f"equivalent.txt: the code has no mutation {', '.join(sorted(gone))}: it was changed; remove the line")
    return reasons


def draw(package: str, equivalent: dict[str, str], root: Path = ROOT) -> list[Mutation]:
    """Return the mutations whose key, hashed with the seed, is smallest: an edit elsewhere does not change the draw."""

    def rank(mutation: Mutation) -> str:
        return hashlib.sha256(f"{SEED} {mutation.key}".encode()).hexdigest()

    results = [mutation for mutation in all_mutations(package, root) if mutation.key not in equivalent]
    return sorted(results, key=rank)[:PER_PACKAGE]


def run(
    copy: WorkingCopy, package: str, equivalent: dict[str, str], only: str | None, again: bool
) -> Iterator[dict[str, Any]]:
    """Yield one row per mutation, from build/mutations if it has a result of the same modules and tests."""
    kept = ROOT / "build" / "mutations"
    kept.mkdir(parents=True, exist_ok=True)
    state = digest(package, copy.folder)
    checked = False
    for mutation in draw(package, equivalent, copy.folder):
        result = kept / f"{mutation.key}-{state}.json"
        if only not in (None, package, mutation.key):
            continue
        if again or not result.exists():
            if not checked:
                check_unchanged(copy, package)
                checked = True
            result.write_text(json.dumps(trial(copy, package, mutation)))
        yield json.loads(result.read_text())


def check_unchanged(copy: WorkingCopy, package: str) -> None:
    """Exit unless the package's tests pass within the limit without a mutation: otherwise nothing would be shown."""
    limit = LIMIT_S * load()
    ended = copy.test(selected_tests(package), limit)
    if ended.code != 0:
        reason = f"did not end within {limit:.0f} s" if ended.code is None else "fail"
        sys.exit(
            f"{ended.output[-3000:]}\nmutations: the tests of {package} {reason} without a mutation: fix them first"
        )
    print(f"{package:10}  tests of the unchanged code: {ended.seconds:.0f} s, limit {limit:.0f} s", flush=True)


def trial(copy: WorkingCopy, package: str, mutation: Mutation) -> dict[str, Any]:
    limit, tests = LIMIT_S * load(), selected_tests(package)
    ended = copy.test(tests, limit, mutation)
    is_caught = ended.code != 0
    if not is_caught:
        ended = copy.test(tests, EVIDENCE_LIMIT_S * load(), mutation, evidence=True)
    by = f"no end within {limit:.0f} s" if ended.code is None else ended.failed or f"exit code {ended.code}"
    if not is_caught and ended.code in (0, NO_TESTS):
        by = ""
    row = {"package": package, "mutation": described(mutation), "caught": is_caught, "by": by}
    print(format_row(row), flush=True)
    return row


def load() -> float:
    """Return how many times longer than on a quiet machine a test may take: the load per CPU, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def digest(package: str, root: Path) -> str:
    paths = [*modules_of(package, root), *(root / name for name in selected_tests(package))]
    content = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(content).hexdigest()[:10]


def described(mutation: Mutation) -> str:
    before, after = (text if len(text) <= 70 else f"{text[:67]}..." for text in (mutation.before, mutation.after))
    place = f"{mutation.path} {mutation.scope or '(module)'}"
    return f"{mutation.key}  {place}: {mutation.operator}: {before} -> {after}"


def format_row(row: dict[str, Any]) -> str:
    kind = "caught" if row["caught"] else "evidence"
    outcome = f"{kind} by {row['by']}" if row["by"] else "SURVIVED"
    return f"{row['package']:10}  {row['mutation']}: {outcome}"


if __name__ == "__main__":
    sys.exit(main())
