"""The docstrings of penstock.torch: they explain every parameter, and their examples run."""

import doctest
import inspect
import re

import pytest

pytest.importorskip("torch")

import penstock.torch as pt

NAMES = pt.__all__


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_explains_every_parameter(name):
    call = getattr(pt, name)
    documented = set(re.findall(r"\w+", " ".join(re.findall(r"^([\w, ]+?)(?: :.*)?$", inspect.getdoc(call), re.M))))
    assert set(inspect.signature(call).parameters) - documented - {"args", "kwargs"} == set()


@pytest.mark.parametrize("name", [name for name in NAMES if ">>>" in (getattr(pt, name).__doc__ or "")])
def test_the_example_of_a_docstring_runs(name):
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(getattr(pt, name)), {}, name, None, 0)
    printed = []
    result = doctest.DocTestRunner(verbose=False).run(examples, out=printed.append)
    assert result.attempted
    assert not result.failed, "".join(printed)
