"""The mutations of ``make mutations``, and how they are drawn."""

import ast
import re
from collections import Counter

import pytest
from mutations.__main__ import HERE, MUST_CATCH, PER_PACKAGE, SEED, draw, read_equivalent
from mutations.operators import mutations
from mutations.packages import PACKAGES, ROOT, all_mutations, selected_tests

SOURCE = b'''"""Docstring 1."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy


@decorated(1)
def first(a: list[1], b):
    if a < 1 and b is None:  # \xc3\xa4
        close(a, b)
    return f"{a == 2}"
'''


def test_every_operator_changes_the_code_and_nothing_else():
    results = [(m.operator, m.before, m.after) for m in mutations("m.py", SOURCE)]
    assert results == [
        ("negation", "a < 1 and b is None", "(not (a < 1 and b is None))"),
        ("negation", "a < 1 and b is None", "(a < 1 or b is None)"),
        ("comparison", "a < 1", "(a <= 1)"),
        ("off by one", "1", "2"),
        ("comparison", "b is None", "(b is not None)"),
        ("removed call", "close(a, b)", "pass"),
        ("swapped arguments", "close(a, b)", "close(b, a)"),
    ]
    for mutation in mutations("m.py", SOURCE):
        before, after = SOURCE.decode().splitlines(), mutation.applied(SOURCE).decode().splitlines()
        assert [number for number in range(len(before)) if before[number] != after[number]] == [mutation.line - 1]
        ast.parse(mutation.applied(SOURCE))


def test_a_key_stays_the_same_when_code_elsewhere_changes():
    moved = SOURCE.replace(b"@decorated", b"x = 5\n\n\n@decorated").replace(b"\xc3\xa4", b"comment")
    keys = {m.key for m in mutations("m.py", SOURCE)}
    assert len(keys) == 7
    assert keys < {m.key for m in mutations("m.py", moved)}


@pytest.mark.sampled("core")
@pytest.mark.parametrize("package", PACKAGES)
def test_the_draw_is_the_same_every_time_and_its_tests_exist(package):
    drawn = draw(package, {})
    assert len(drawn) == PER_PACKAGE
    assert draw(package, {}) == drawn
    struck_out = draw(package, {drawn[0].key: "equivalent"})
    assert struck_out[:-1] == drawn[1:]
    assert all((ROOT / test).exists() for test in selected_tests(package))


def test_the_equivalent_mutations_are_of_code_that_exists():
    assert all(reason for reason in read_equivalent().values())  # exits if one is gone


def test_the_results_are_complete_and_of_functions_that_exist():
    row = re.compile(r"^(\w+) +[0-9a-f]{10}  (\S+) (\S+): .*: (caught by \S.*|SURVIVED)$", re.MULTILINE)
    text = (HERE / "results.txt").read_text()
    rows = row.findall(text)
    assert Counter(package for package, *_ in rows) == dict.fromkeys(PACKAGES, PER_PACKAGE)
    exist = {(m.path, m.scope or "(module)") for package in PACKAGES for m in all_mutations(package)}
    assert {(path, scope) for _, path, scope, _ in rows} - exist == set()
    caught = sum(outcome != "SURVIVED" for *_, outcome in rows)
    assert text.endswith(f"\n{caught} of {len(rows)} caught (seed {SEED}, {PER_PACKAGE} of each package)\n")
    assert caught >= MUST_CATCH
