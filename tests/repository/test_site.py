"""The site: every public name has one place, and its pages lead to it and fit every window."""

import importlib
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from browser import NARROW
from scripts import ROOT, loaded, site_pages

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


@pytest.fixture
def site(tmp_path):
    """The address of the built site; without the tools of the extra ``docs`` there is none."""
    pytest.importorskip("mkdocs")
    (tmp_path / "0.0.9").mkdir()
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / ps.__version__)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an announcement, not a warning
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_site_leads_to_its_newest_version_finds_names_and_fits_a_narrow_window(site, browser):
    page = browser.open(f"{site}/")
    page.until("document.querySelector('.md-version__link') !== null")
    assert page.value("location.pathname") == f"/{ps.__version__}/"
    links = page.value("[...document.querySelectorAll('.md-version__link')].map(link => link.textContent.trim())")
    assert links == [ps.__version__, "0.0.9"]
    page = browser.open(f"{site}/{ps.__version__}/?q=retrieve_parameters")
    page.until("document.querySelector('.md-search-result__link[href*=\"reference/engine/\"]') !== null")
    for path in ("", "tables/", "reference/engine/", "cli/"):
        page = browser.open(f"{site}/{ps.__version__}/{path}", NARROW, dark=True)
        page.until("document.body.dataset.mdColorScheme === 'slate'")
        assert (path, page.overflow, page.errors) == (path, 0, [])
