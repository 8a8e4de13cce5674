"""Pages of the site that are made when it is built: the Python names from their docstrings, the commands from --help.

mkdocs calls ``on_files`` (mkdocs.yml); tests call ``api`` and ``commands`` directly. ``python docs/hooks.py`` writes
the flags of ``replay`` and of commands that share them into docs/cli.md; a test compares.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from pathlib import Path
from typing import Any

CLI_PAGE = Path(__file__).with_name("cli.md")
FLAGS = re.compile(r"(<!-- flags: (\w+) -->).*?(<!-- end -->)", re.DOTALL)
GENERATED = {"reference/api.md": "api", "reference/help.md": "commands"}


def on_files(files: Any, config: Any) -> Any:
    """Add what is generated to what lies in docs/."""
    from mkdocs.structure.files import File

    for uri, maker in GENERATED.items():
        files.append(File.generated(config, uri, content=globals()[maker]()))
    return files


def api() -> str:
    """Every public name with its signature and what it says of itself."""
    import penstock

    parts = ["# Python names", "", "All of `import penstock as ps`. Names load when they are first used.", ""]
    for name in penstock.__all__:
        value = getattr(penstock, name)
        parts += [f"## {name}", "", *described(name, value)]
        members = public_members(value) if inspect.ismodule(value) else [(name, value)]
        for member, of_package in members:
            parts += [f"### {member}", "", *described(member, of_package)] if member != name else []
            for method, function in public_methods(of_package):
                parts += [f"### {member}.{method}", "", *described(method, function)]
    return "\n".join(parts)


def public_members(package: Any) -> list[tuple[str, Any]]:
    """Functions and classes of a package."""
    members = [(name, getattr(package, name)) for name in package.__all__]
    return [(name, value) for name, value in members if inspect.isfunction(value) or inspect.isclass(value)]


def described(name: str, value: Any) -> list[str]:
    """Signature and docstring, as they stand in the source."""
    try:
        signature = re.sub(r"<(factory|object|function)[^>]*>", "…", str(inspect.signature(value)))
    except (TypeError, ValueError):
        signature = ""
    head = [] if isinstance(value, property) else ["```text", name + signature.replace("'", ""), "```", ""]
    text = inspect.cleandoc(getattr(value, "__doc__", None) or "")
    return [*head, "```text", text, "```", ""] if text else head


def public_methods(value: Any) -> list[tuple[str, Any]]:
    """Methods and properties of a class that have something to say, in the order of the source."""
    if not inspect.isclass(value) or issubclass(value, BaseException):
        return []
    found = []
    own = [kind for kind in value.__mro__ if kind.__module__.startswith("penstock.")]
    for name, member in (item for kind in own for item in vars(kind).items()):
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        plain = inspect.isfunction(function) or isinstance(function, property)
        if plain and not name.startswith("_") and inspect.getdoc(function):
            found.append((name, function))
    return found


def commands() -> str:
    """``--help`` of every command."""
    from penstock.cli.main import parser

    os.environ["COLUMNS"] = "100"  # argparse fits its text to the terminal, and there is none
    top = parser()
    parts = ["# Every command's --help", "", "```text", top.format_help().rstrip(), "```", ""]
    for name, command in top.commands.items():
        parts += [f"## penstock {name}", "", "```text", command.format_help().rstrip(), "```", ""]
    return "\n".join(parts)


def flags_of(modes: str) -> str:
    """The flags of ``replay`` as a list of Markdown, or the names of those that another command shares with it."""
    from penstock.options import options_of

    wanted = {"run", "job", "passes"} if modes == "replay" else {modes}
    options = [option for option in options_of().values() if option.flag is not None and option.modes & wanted]
    if modes != "replay":
        names = ", ".join(f"`{option.flag_name}`" for option in options)
        indent = "  " if modes == "check" else ""  # which stands in an item of a list
        return f"\n{filled(names, indent, indent)}\n{indent}"
    items = [filled(f"- `{typed(option)}`: {meaning(option)}", "", "  ") for option in options]
    return "\n".join(["\n", *items, "", ""])


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
