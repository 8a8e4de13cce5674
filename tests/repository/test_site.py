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
from scripts import ROOT, listed_names

import penstock as ps

# Packages whose ``__all__`` is public.
PACKAGES = ("bridge", "functional", "ray", "updates")
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


def test_every_public_name_is_on_exactly_one_page():
    listed = [f"{module}.{name}" for module, names in listed_names().items() for name in names]
    public = {f"penstock.{name}" for name in ps.__all__ if name not in PACKAGES}
    for package in PACKAGES:
        names = importlib.import_module(f"penstock.{package}").__all__
        public |= {f"penstock.{package}.{name}" for name in names if name not in ps.__all__}
    assert public - set(listed) == set()
    assert [name for name, count in Counter(listed).items() if count != 1] == []
    assert [name for name in listed if name.rpartition(".")[2] in ps.__all__ and name.count(".") > 1] == []


def test_the_names_of_torch_are_on_its_page():
    assert set(listed_names()["penstock.torch"]) == set(pytest.importorskip("penstock.torch").__all__)


def test_every_name_that_a_page_imports_is_listed():
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts]
    imports = re.findall(r"^ *from (penstock\.[\w.]+) import ([\w, ]+)$", "\n".join(pages), re.MULTILINE)
    names = {f"{module}.{name}" for module, names in imports for name in names.split(", ")}
    assert "penstock.ray.Job" in names
    assert names - {f"{module}.{name}" for module, names in listed_names().items() for name in names} == set()


# ---- built


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the built site; without the tools of the extra ``docs`` there is none."""
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    (folder / "0.0.9").mkdir()
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder / ps.__version__)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an announcement, not a warning
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True)
    return folder


def test_the_reference_shows_keywords_types_links_and_examples_of_every_name(built):
    folder = built / ps.__version__ / "reference"
    pages = {page.parent.name: page.read_text() for page in folder.glob("*/index.html")}
    text = "\n".join(pages.values())
    names = [f"{module}.{name}" for module, names in listed_names().items() for name in names]
    assert [name for name in names if f'id="{name}"' not in text] == []
    words = " ".join(re.sub("<[^>]*>", "", pages["engine"]).split())
    assert "contribution_rows (int | str | None, default: None ) – a frame is N rows" in words
    assert "reduction (&#39;mean&#39; or &#39;sum&#39; or None, default: None )" in words
    assert 'id="penstock.Engine.retrieve_parameters"' in pages["engine"]
    assert 'href="../../brokers/">brokers<' in pages["engine"]
    assert "save_own_variables" not in pages["functional"]
    assert text.count("&gt;&gt;&gt; ") > 500


# ---- in a browser


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *message):
        pass


@pytest.fixture(scope="module")
def site(built):
    """The address of the built site."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=built)) as server:
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
