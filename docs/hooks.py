"""The site's first screen, its generated pages and plots, and its folder of versions.

mkdocs calls the functions ``on_…`` (mkdocs.yml). The generated pages, which are in no folder: every ``--help``, the
findings of lint, and the promises of the tests. Those in docs/evidence/ get their tables and plots from evidence.py.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import penstock

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FIRST_SCREEN = re.compile(r"<!-- (?:the )?first screen.*?-->\n")
VERSION = re.compile(r"\d+(\.\d+)+\w*")
SECTION = re.compile(r"<!-- README.md: (.*) \(docs/hooks.py\) -->")
EVIDENCE = re.compile(r"<!-- docs/evidence.py: (\w+) -->")
REDIRECT = """<!doctype html><meta charset="utf-8"><title>penstock</title>
<meta http-equiv="refresh" content="0; url={version}/"><a href="{version}/">penstock {version}</a>
"""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and plots to the files of docs/."""
    from mkdocs.structure.files import File

    plots = {f"evidence/plots/{name}.svg": plot for name, plot in evidence().plots().items()}
    for name, content in {**{name: create() for name, create in GENERATED.items()}, **plots}.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put README's first screen and sections where a page marks them, and figures where a page of evidence does."""
    if page.file.src_uri.startswith(("reference/", "decisions/", "evidence/")):
        page.meta["search"] = {"boost": 0.5}  # behind the pages that say how to do something
    if page.file.src_uri == "index.md":
        markdown = FIRST_SCREEN.sub(lambda _: first_screen(), markdown)
    markdown = SECTION.sub(lambda mark: section(mark[1]), markdown)
    return EVIDENCE.sub(lambda mark: evidence().TABLES[mark[1]](), markdown)


def on_post_build(config: Any) -> None:
    """List the versions that lie next to this one, for the theme's menu, and lead from their folder to the newest."""
    site = Path(config.site_dir)
    if site.name == penstock.__version__:  # not of ``mkdocs serve``
        names = [folder.name for folder in site.parent.iterdir() if VERSION.fullmatch(folder.name)]
        names.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)], reverse=True)
        versions = [{"version": name, "title": name, "aliases": []} for name in names]
        (site.parent / "versions.json").write_text(json.dumps(versions))
        (site.parent / "index.html").write_text(REDIRECT.format(version=names[0]))


@cache
def evidence() -> Any:
    """Return evidence.py as a module."""
    spec = importlib.util.spec_from_file_location("evidence", Path(__file__).with_name("evidence.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_screen() -> str:
    """README's part between its two marks."""
    return for_site(FIRST_SCREEN.split(README.read_text())[1])


def section(title: str) -> str:
    """README's section of a title."""
    return for_site(README.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0].strip())


def for_site(text: str) -> str:
    """A text of README with links that begin in docs/."""
    return text.replace("](docs/", "](")


def commands() -> str:
    """``--help`` of every command, and what it leaves to say."""
    from penstock.cli.main import parser

    os.environ["COLUMNS"] = "100"  # argparse fits its text to the terminal, and there is none
    top = parser()
    parts = ["# Every command's --help", "", "```text", top.format_help().rstrip(), "```", ""]
    for name, command in top.commands.items():
        parts += [f"## penstock {name}", "", "```text", command.format_help().rstrip(), "```", ""]
    return "\n".join([*parts, "## More about flags", "", *more_about_flags(), ""])


def more_about_flags() -> Iterator[str]:
    """Yield the flags of which the help leaves something to say, and the pages that say more."""
    from penstock.model.command_options import options_of

    for option in options_of().values():
        if option.flag is not None and (option.flag.details or option.flag.pages):
            links = ", ".join(f"[{page.partition('#')[0]}](../{page})" for page in option.flag.pages)
            yield f"- `{option.flag_name}`: {'. '.join(text for text in (option.flag.details, links) if text)}"


def findings() -> str:
    """Every finding of lint."""
    from penstock.model.config.lint.findings import ADVICE, RULES

    lines = [f"- **{code}**, {severity}: {title}. {ADVICE[code]}" for code, (severity, title) in RULES.items()]
    head = "What [`penstock validate`](../configuration.md#findings) and `config.lint()` report."
    return "\n".join(["# Findings of lint", "", head, "", *lines, ""])


def promises() -> str:
    """What tests promise, with the names of the tests."""
    tests: dict[str, list[str]] = {}
    for promise, test in promised():
        tests.setdefault(promise, []).append(test)
    parts = ["# Promises and their tests", "", "Read from the marks of the tests when the site is built.", ""]
    for promise in sorted(tests):
        parts += [f"- **{promise}**", *(f"    - `{test}`" for test in tests[promise])]
    return "\n".join([*parts, ""])


def promised() -> Iterator[tuple[str, str]]:
    """Yield (promise, FILE::TEST) of every test that a ``pytest.mark.promise("…")`` marks, without importing it."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "mark.promise(" in text else ():
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                    yield ast.literal_eval(mark.args[0]), f"{path.relative_to(ROOT)}::{node.name}"


GENERATED = {"reference/help.md": commands, "reference/findings.md": findings, "reference/promises.md": promises}
