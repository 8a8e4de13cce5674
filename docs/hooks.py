"""The site's first screen, its page of every --help, and its folder of versions.

mkdocs calls the functions ``on_…`` (mkdocs.yml). ``python docs/hooks.py`` writes the flags of ``replay``
and of commands that share them into docs/cli.md; a test compares.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import penstock

CLI_PAGE = Path(__file__).with_name("cli.md")
FLAGS = re.compile(r"(<!-- flags: (\w+) -->).*?(<!-- end -->)", re.DOTALL)
README = CLI_PAGE.parents[1] / "README.md"
FIRST_SCREEN = re.compile(r"<!-- (?:the )?first screen.*?-->\n")
VERSION = re.compile(r"\d+(\.\d+)+\w*")
REDIRECT = """<!doctype html><meta charset="utf-8"><title>penstock</title>
<meta http-equiv="refresh" content="0; url={version}/"><a href="{version}/">penstock {version}</a>
"""


def on_files(files: Any, config: Any) -> Any:
    """Add the page of commands to the files of docs/."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference/help.md", content=commands()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put README's first screen where the home page marks it."""
    return FIRST_SCREEN.sub(lambda _: first_screen(), markdown) if page.file.src_uri == "index.md" else markdown


def on_post_build(config: Any) -> None:
    """List the versions that lie next to this one, for the theme's menu, and lead from their folder to the newest."""
    site = Path(config.site_dir)
    if site.name == penstock.__version__:  # not of ``mkdocs serve``
        names = [folder.name for folder in site.parent.iterdir() if VERSION.fullmatch(folder.name)]
        names.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)], reverse=True)
        versions = [{"version": name, "title": name, "aliases": []} for name in names]
        (site.parent / "versions.json").write_text(json.dumps(versions))
        (site.parent / "index.html").write_text(REDIRECT.format(version=names[0]))


def first_screen() -> str:
    """README's part between its two marks, with links that begin in docs/."""
    return FIRST_SCREEN.split(README.read_text())[1].replace("](docs/", "](")


def commands() -> str:
    """``--help`` of every command."""
    from penstock.cli.main import parser

    os.environ["COLUMNS"] = "100"  # argparse fits its text to the terminal, and there is none
    top = parser()
    parts = ["# Every command's --help", "", "```text", top.format_help().rstrip(), "```", ""]
    for name, command in top.commands.items():
        parts += [f"## penstock {name}", "", "```text", command.format_help().rstrip(), "```", ""]
    return "\n".join(parts)


def flags_of(mode: str) -> str:
    """The flags of ``replay`` (mode "run") as a list of Markdown, or those that another command shares, and its own."""
    from penstock.model.options import options_of

    options = [option for option in options_of(mode).values() if option.flag is not None]
    shared = [] if mode == "run" else [option for option in options if "run" in option.modes]
    items = [filled(f"- `{typed(option)}`: {meaning(option)}", "", "  ") for option in options if option not in shared]
    if not shared:
        return "\n".join(["\n", *items, "", ""])
    indent = "  " if mode == "check" else ""  # which stands in an item of a list
    names = filled(", ".join(f"`{option.flag_name}`" for option in shared), indent, indent)
    return "\n".join(["", names, *(["", "In addition:", "", *items, ""] if items else []), indent])


def filled(text: str, first: str, rest: str) -> str:
    """Markdown in lines of at most 120 characters. Inline code is not broken, and no line begins with a lone dash."""
    whole = re.sub(r"`[^`]*`| (?=- )", lambda part: part[0].replace(" ", "\0"), text)
    lines = textwrap.fill(
        whole, 120, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )
    return lines.replace("\0", " ")


def typed(option: Any) -> str:
    """The flag with its value, as users type it."""
    value = option.flag.metavar or "|".join(option.flag.choices)
    value = f"[{value}]" if option.flag.bare else value
    return f"{option.flag_name} {value}".strip()


def meaning(option: Any) -> str:
    """The help of the flag, what docs/cli.md adds, and links to the pages that say more."""
    links = ", ".join(f"[{page.partition('#')[0]}]({page})" for page in option.flag.pages)
    text = option.flag_help + (f" ({links})" if links else "")
    text = re.sub(r"(--[a-z][a-z-]*|[A-Z]+=[A-Z]+|DIR/\S+|'\w+')", lambda word: f"`{word[0].strip(chr(39))}`", text)
    return f"{text}. {option.flag.details}" if option.flag.details else text


def written(page: str) -> str:
    """A page with the current flags between its marks."""
    return FLAGS.sub(lambda marks: marks[1] + flags_of(marks[2]) + marks[3], page)


if __name__ == "__main__":
    CLI_PAGE.write_text(written(CLI_PAGE.read_text()))
