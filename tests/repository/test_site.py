"""The site: every public name has one place, and its pages fit every window."""

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
from browser import WIDTHS
from scripts import ROOT, loaded, site_pages

import penstock as ps

api_pages = loaded("docs/api_pages.py")
# Of each kind of page one, those with wide tables and long lines.
PAGES = [
    "",
    "tables/",
    "reference/",
    "reference/engine/",
    "reference/functional/",
    "reference/help/",
    "tutorials/replay/",
    "tutorials/from_torch/",
    "decisions/",
    "decisions/service/",
    "cli/",
    "performance/",
    "streaming/",
]


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


def test_every_name_that_a_page_imports_is_listed():
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts]
    imports = re.findall(r"^ *from (penstock\.[\w.]+) import ([\w, ]+)$", "\n".join(pages), re.MULTILINE)
    names = {f"{module}.{name}" for module, names in imports for name in names.split(", ")}
    assert "penstock.ray.Job" in names
    assert names - set(listed_names()) == set()


def test_a_name_shows_its_signature_with_all_parameters_and_its_methods():
    engine, functional = (site_pages()[group] for group in ("engine", "functional"))
    assert '### Engine.run { #Engine.run data-toc-label="run" }\n\n```python\nEngine.run(\n    source: Any,' in engine
    assert "### Engine.global_step " in engine
    assert "penstock.functional.keras_embedding.PreparedBatches(\n    layer: Embedding," in functional
    assert "save_own_variables" not in functional


# ---- in a browser


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *message):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the built site; without the tools of the extra ``docs`` there is none."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    (folder / "0.0.9").mkdir()
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder / ps.__version__)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an announcement, not a warning
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_site_lists_its_versions_and_leads_to_the_newest(site, browser):
    page = browser.open(f"{site}/")
    page.until("location.pathname !== '/'")
    assert page.value("location.pathname") == f"/{ps.__version__}/"
    page.until("document.querySelector('.md-version__link') !== null")
    links = page.value("[...document.querySelectorAll('.md-version__link')].map(link => link.textContent.trim())")
    assert links == [ps.__version__, "0.0.9"]


def test_a_search_finds_a_method_on_its_page(site, browser):
    page = browser.open(f"{site}/{ps.__version__}/?q=retrieve_parameters")
    page.until("document.querySelector('.md-search-result__link') !== null")
    links = page.value("[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
    assert any("reference/engine/" in link for link in links)


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_their_window_in_light_and_dark_and_log_no_error(site, width, browser):
    problems = {}
    for number, path in enumerate(PAGES):
        page = browser.open(f"{site}/{ps.__version__}/{path}", width, dark=number % 2 == 1)
        scheme = "slate" if number % 2 else "default"
        page.until(f"document.body.dataset.mdColorScheme === '{scheme}'")
        if page.overflow > 0 or page.errors:
            problems[path] = page.overflow, page.errors
        page.close()
    assert problems == {}
