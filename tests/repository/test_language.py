"""Pages, docstrings, comments, messages, and names of tests contain no phrase of banned_phrases.txt."""

import ast
import inspect
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "tests" / "support" / "banned_phrases.txt").read_text().splitlines()
BANNED = [re.compile(rf"(?i)\b(?:{line})(?!\w)") for line in LINES if line and not line.startswith("#")]

# Files and folders whose prose is not clean yet. These lists only shrink: an entry that has become clean fails a
# test until it is removed.
PAGES_NOT_YET: list[str] = []
CODE_NOT_YET: list[str] = []
NAMES_NOT_YET: list[str] = []


def pages():
    results = [
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "bench", "examples") for page in (ROOT / folder).rglob("*.md")),
    ]
    return sorted(str(page.relative_to(ROOT)) for page in results)


def modules():
    folders = [ROOT / folder for folder in ("engine", "io", "pyx", "bench", "examples", "tests")]
    results = (path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".pyx", ".pxd", ".h"))
    names = (str(path.relative_to(ROOT)) for path in results)
    # This file quotes banned phrases.
    return sorted(name for name in names if not name.endswith(("_pb2.py", "test_language.py")))


def names_of_tests():
    """Return (file, name as a sentence) of every test."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^ *def test_(\w+)\(", path.read_text(), re.MULTILINE):
            yield str(path.relative_to(ROOT)), name.replace("_", " ")


def prose_of_page(text):
    """Return a page without fenced code, inline code and the targets of links, its white space single spaces."""
    text = re.sub(r"^( *)```.*?^ *```", " ", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "CODE", text)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


def prose_of_module(text):
    """Return a module's docstrings, comments and other strings, messages among them."""
    nodes = ast.walk(ast.parse(text))
    results = [
        inspect.cleandoc(node.value) for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    results += [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return without_code(results)


def prose_of_kernel(text):
    """Return the docstrings and comments of Cython or C code."""
    blocks = re.findall(r'"""(.*?)"""', text, re.DOTALL) + re.findall(r"/\*(.*?)\*/", text, re.DOTALL)
    return without_code(blocks + re.findall(r"(?:#|//) (.*)", text))


def without_code(texts):
    """Return texts as one, their white space single spaces and ``code`` omitted."""
    return " ".join(re.sub(r"`+[^`]*`+", "CODE", " ".join(texts)).split())


def phrases(path):
    """Return the banned phrases in the prose of a page or module, each with the words around it."""
    text, prose_of = (ROOT / path).read_text(), {".md": prose_of_page, ".py": prose_of_module}
    prose = prose_of.get(Path(path).suffix, prose_of_kernel)(text)
    results = sorted((match.start(), match.end()) for banned in BANNED for match in banned.finditer(prose))
    return [f"{path}: … {prose[max(0, start - 30) : end + 20]} …" for start, end in results]


def listed(path, entries):
    return any(path == entry or path.startswith(f"{entry}/") for entry in entries)


def test_pages_use_no_banned_phrase():
    assert [line for page in pages() if not listed(page, PAGES_NOT_YET) for line in phrases(page)] == []


# What a program writes between marks, or as a whole: tables whose columns are wide.
WRITTEN_BY_PROGRAMS = re.compile(r"<!-- [^>]*: begin -->\n.*?<!-- [^>]*: end -->", re.DOTALL)
MOST_CHARACTERS = 120


@pytest.mark.parametrize("page", [page for page in pages() if not page.startswith("bench/results/")])
def test_no_line_of_a_page_has_more_than_120_characters(page):
    lines = WRITTEN_BY_PROGRAMS.sub("", (ROOT / page).read_text()).splitlines()
    assert [line for line in lines if len(line) > MOST_CHARACTERS] == []


def test_docstrings_comments_and_strings_use_no_banned_phrase():
    assert [line for module in modules() if not listed(module, CODE_NOT_YET) for line in phrases(module)] == []


def test_names_of_tests_use_no_banned_phrase_and_do_not_begin_with_what():
    results = [(file, name) for file, name in names_of_tests() if not listed(file, NAMES_NOT_YET)]
    assert len(results) > 1000
    assert [
        f"{file}: {name}"
        for file, name in results
        if re.match("(what|who|whoever) ", name) or any(banned.search(f"{name.capitalize()}.") for banned in BANNED)
    ] == []


def test_entries_of_the_lists_that_have_become_clean_are_removed():
    for entries, paths in ((PAGES_NOT_YET, pages()), (CODE_NOT_YET, modules())):
        unclean = [path for path in paths if listed(path, entries) and phrases(path)]
        clean = [entry for entry in entries if not any(listed(path, [entry]) for path in unclean)]
        assert clean == [], "remove these entries: the prose that they name is clean, or gone"


@pytest.mark.parametrize("phrase", ["It was told.", "The run goes\n  on.", "Done. What is left is small."])
def test_a_banned_phrase_is_found_in_prose_and_not_in_code(phrase):
    results = [banned for banned in BANNED if banned.search(prose_of_page(f"A page. {phrase}"))]
    assert len(results) == 1
    assert results[0].search(prose_of_module(f'"""A module. {phrase}"""\n'))
    assert not results[0].search(prose_of_page(f"A page.\n```text\nDone. {phrase}\n```\n"))
    assert results[0].search(prose_of_module(f'text = """Done. {phrase}"""\n'))
    for code in (f'cdef int f():\n    """Done. {phrase}"""\n', f"// Done.\n/* A kernel. {phrase} */\n"):
        assert results[0].search(prose_of_kernel(code))


def test_a_question_may_begin_with_what_is():
    assert not any(banned.search(prose_of_page("Ask. What is left? Nothing.")) for banned in BANNED)
