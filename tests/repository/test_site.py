"""The site: every public name has one place, and its pages lead to it and fit every window."""

import importlib
import json
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
from scripts import ROOT, listed_names

import penstock as ps

# Packages whose ``__all__`` is public.
PACKAGES = ("bridge", "functional", "ray", "updates")


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


# Questions in the words of those who ask, five of each kind, and the pages of which one answers: among the first three.
QUESTIONS = {
    "a torch engineer": {
        "train a torch model on several machines": "tutorials/ranks",
        "gradient clipping torch": "torch, tutorials/from_torch",
        "learning rate scheduler": "tutorials/from_torch, torch",
        "migrate from torchrec": "tutorials/moving",
        "load torch checkpoint": "import, tutorials/from_torch",
    },
    "a data engineer": {
        "read delta lake": "sources",
        "kafka offset resume": "sources",
        "nan gradients": "bad_rows",
        "keep redis up to date": "follow, targets",
        "spark": "stages",
    },
    "an operator": {
        "undo a bad day": "tutorials/undo",
        "systemd restart": "deploy",
        "rotate tokens": "operations",
        "what to alert on": "operations",
        "exit code 6": "cli",
    },
    "a JAX user": {
        "keras layer": "functional",
        "optax optimizer": "functional",
        "orbax checkpoint": "functional, scaling, import",
        "table larger than memory": "placement",
        "several processes jax distributed": "scaling",
    },
    "a contributor": {
        "add a connector": "decisions/connectors",
        "order of a sum": "decisions/sums, explanation/determinism, scaling",
        "list of promises": "reference/promises",
        "which package may import": "decisions/layers",
        "evidence tests": "decisions/tests, reference/promises",
    },
}

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
    assert 'href="../../sources/">sources<' in pages["engine"]
    assert "save_own_variables" not in pages["functional"]
    assert text.count("&gt;&gt;&gt; ") > 500


def test_the_site_holds_pages_and_what_they_show_only(built):
    kinds = {path.suffix for path in built.rglob("*") if path.is_file()}
    assert kinds <= {".html", ".css", ".js", ".json", ".map", ".svg", ".png", ".webp", ".xml", ".gz", ".inv"}
    assert list(built.rglob("__pycache__")) == []


@pytest.fixture
def site(built):
    """The address of the built site."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=built)) as server:
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
    for path in ("", "configuration/", "reference/engine/", "cli/"):
        page = browser.open(f"{site}/{ps.__version__}/{path}", NARROW, dark=True)
        page.until("document.body.dataset.mdColorScheme === 'slate'")
        assert (path, page.overflow, page.errors) == (path, 0, [])


def first_hits(page, query):
    """Return the pages that the search of the site lists first, without the parts of pages."""
    page.value("document.querySelector('.md-search-result__meta').textContent = ''")
    page.value(f"document.querySelector('.md-search__input').value = {json.dumps(query)}")
    page.value("document.querySelector('.md-search__input').dispatchEvent(new Event('keyup'))")
    page.until("document.querySelector('.md-search-result__meta').textContent.trim() !== ''")
    page.until("document.querySelectorAll('.md-search-result__item').length >= 3")
    links = page.value("[...document.querySelectorAll('.md-search-result__item')].map(i => i.querySelector('a').href)")
    return [re.sub(r"/?([?#].*)?$", "", link.partition(f"/{ps.__version__}/")[2]) for link in links[:3]]


def test_the_sites_search_answers_in_the_words_of_each_kind_of_user(site, browser):
    page = browser.open(f"{site}/{ps.__version__}/?q=penstock")
    page.until("document.querySelector('.md-search-result__item') !== null")
    hits = {query: first_hits(page, query) for questions in QUESTIONS.values() for query in questions}
    wanted = {query: names.split(", ") for questions in QUESTIONS.values() for query, names in questions.items()}
    assert {query: found for query, found in hits.items() if not set(found) & set(wanted[query])} == {}
