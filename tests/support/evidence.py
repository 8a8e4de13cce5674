"""Which tests ``make test`` leaves to ``make evidence``: most combinations of parameters, and most random examples.

``make test`` is for the edit loop: every behaviour, in few cases. ``make evidence`` runs the other cases, and the
random tests with all of their examples; with ROTATION=k/n, the k-th of n parts of them. The markers stand at the tests:

    @pytest.mark.evidence                      # the behaviour has another, cheaper test
    @pytest.mark.sampled("3-host", "8-xla")    # make test runs these cases, make evidence the other ones
    @evidence.examples(500, 20)                # make test runs 20 random examples, make evidence 500
"""

from __future__ import annotations

import os
import zlib

import pytest
from hypothesis import settings

IS_EVIDENCE = os.environ.get("PENSTOCK_EVIDENCE") in ("1", "long")
# `make evidence EVIDENCE=long`: hundreds of random histories of operations and of kills, for which .ci/run has no time.
IS_LONG = os.environ.get("PENSTOCK_EVIDENCE") == "long"


def examples(number: int, sample: int, **options):
    """Return a decorator that sets the random examples of a test: ``number`` in ``make evidence``, else ``sample``.

    options : further settings of Hypothesis
    """

    def decorate(test):
        return more_as_evidence(settings(max_examples=number if IS_EVIDENCE else sample, **options)(test))

    return decorate


def more_as_evidence(test):
    """Mark a test that checks more if IS_EVIDENCE, so that ``make evidence`` runs it again."""
    return pytest.mark.evidence(test) if IS_EVIDENCE else test


def mark(items) -> None:
    """Mark the collected cases that only ``make evidence`` runs. Raises UsageError for an id that no case has."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, cases in tests.items():
        sampled = cases[0].get_closest_marker("sampled").args
        ids = {item.nodeid.partition("[")[2].removesuffix("]"): item for item in cases}
        unknown = set(sampled) - ids.keys()
        if unknown and len(cases) > len(sampled):  # else the command line selects single cases
            raise pytest.UsageError(f"{test} has no case {sorted(unknown)}, which its marker `sampled` lists")
        for case, item in ids.items():
            if case not in sampled:
                item.add_marker(pytest.mark.evidence)


def rotate(config, items) -> None:
    """Deselect the tests of evidence that are in another part of the rotation (ROTATION=k/n), in every environment."""
    part, _, parts = os.environ.get("ROTATION", "0/1").partition("/")
    others = [
        item
        for item in items
        if item.get_closest_marker("evidence") and zlib.crc32(item.nodeid.encode()) % int(parts) != int(part)
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
