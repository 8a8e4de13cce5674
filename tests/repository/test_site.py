"""The site: every public name has one place."""

import importlib
import re
from collections import Counter

import pytest
from scripts import loaded, site_pages

import penstock as ps

api_pages = loaded("docs/api_pages.py")


def listed_names():
    """The names that the pages list, with the module that they are imported from."""
    text = "\n".join(site_pages().values())
    return re.findall(r"^## \S+ \{ #\S+ \}\n\n```python\n([\w.]+)", text, re.MULTILINE)


def test_every_public_name_is_in_exactly_one_group():
    public = {f"penstock.{name}" for name in ps.__all__ if name not in api_pages.PACKAGES}
    for package in ("penstock.bridge", "penstock.functional", "penstock.updates", "penstock.ray"):
        names = importlib.import_module(package).__all__
        public |= {f"{package}.{name}" for name in names if name not in ps.__all__}
    public |= {f"{module}.{name}" for module, names in api_pages.MODULES.items() for name in names}
    counts = Counter(listed_names())
    assert {name: counts[name] for name in public if counts[name] != 1} == {}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_the_names_of_torch_are_in_its_group():
    names = pytest.importorskip("penstock.torch").__all__
    assert {name for name in listed_names() if ".torch." in name} == {f"penstock.torch.{name}" for name in names}
