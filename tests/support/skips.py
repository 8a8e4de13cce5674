"""``python tests/support/skips.py``: which tests were skipped, by the JUnit files of test runs in several environments.

list FILE      prints the tests that the run of FILE skipped, as arguments for pytest
check FILE...  fails if every environment skipped a test for a reason that .ci/skips.txt does not list

A module that was skipped as a whole counts as one test, until an environment has collected its tests.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ALLOWED = Path(__file__).resolve().parents[2] / ".ci" / "skips.txt"

# Test → the reason why it was skipped; None: it ran.
Outcomes = dict[str, str | None]


def outcomes(junit_file: str) -> Outcomes:
    results: Outcomes = {}
    for case in ElementTree.parse(junit_file).iter("testcase"):
        # The class name is the test's module; a module that was skipped as a whole has none.
        module, name = case.get("classname", ""), case.get("name", "")
        test = f"{module.replace('.', '/')}.py::{name}" if module else f"{name.replace('.', '/')}.py"
        skipped = case.find("skipped")
        reason = None
        if skipped is not None and skipped.get("type") != "pytest.xfail":
            reason = " ".join(f"{skipped.get('message')} {skipped.text}".split())
        results[test] = reason
    return results


def skipped_everywhere(environments: list[Outcomes]) -> dict[str, str]:
    """Return test → reason in the last environment that skipped it, of the tests that no environment ran."""
    collected = {test.partition("::")[0] for environment in environments for test in environment if "::" in test}
    ran = {test for environment in environments for test, reason in environment.items() if reason is None}
    reasons = {
        test: reason for environment in environments for test, reason in environment.items() if reason is not None
    }
    return {test: reason for test, reason in reasons.items() if test not in ran | collected}


def allowed_reasons(path: Path = ALLOWED) -> list[re.Pattern[str]]:
    lines = (line.partition("  # ")[0] for line in path.read_text().splitlines())
    return [re.compile(line) for line in lines if line and not line.startswith("#")]


def check(environments: list[Outcomes]) -> list[str]:
    """Return one line for each test that was skipped everywhere without a listed reason."""
    allowed = allowed_reasons()
    results = sorted(skipped_everywhere(environments).items())
    return [f"{test}: {reason}" for test, reason in results if not any(a.search(reason) for a in allowed)]


def main(command: str, *files: str) -> int:
    environments = [outcomes(file) for file in files]
    if command == "list":
        skipped = [test for environment in environments for test, reason in environment.items() if reason is not None]
        print(*skipped, sep="\n")
        return 0 if skipped else 1  # without a list pytest would run every test
    faults = check(environments)
    everywhere = len(skipped_everywhere(environments))
    print(*faults, sep="\n", end="\n" if faults else "")
    print(f"{everywhere} tests are skipped in every environment; {len(faults)} of them are not listed in .ci/skips.txt")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
