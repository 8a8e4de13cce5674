"""Pages of the site that are made when it is built: the Python names from their docstrings, the commands from --help.

mkdocs calls ``on_files`` (mkdocs.yml); tests call ``api`` and ``commands`` directly. ``python docs/hooks.py`` writes
the flags of ``replay`` and of commands that share them into docs/cli.md; a test compares.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import textwrap
from pathlib import Path
from typing import Any

CLI_PAGE = Path(__file__).with_name("cli.md")
FLAGS = re.compile(r"(<!-- flags: (\w+) -->).*?(<!-- end -->)", re.DOTALL)
# Public names that ``import penstock`` does not offer.
MODULES = {
    "penstock.accumulators.frame_gate": ("FrameGate",),
    "penstock.config.specs": ("TableSpec",),
    "penstock.io.flight": ("Client", "Producer", "Ack", "Delta", "TableAt", "LookupResult"),
    "penstock.io.log": ("LogWriter",),
    "penstock.io.quarantine": ("QuarantineWriter",),
    "penstock.io.targets.follower": ("Follower", "Progress"),
    "penstock.io.targets.target": ("Target", "Stored", "TableRows"),
    "penstock.metrics": ("Metrics",),
    "penstock.ray": ("Job",),
    "penstock.shares": ("Router",),
    "penstock.stats": ("KeyReport", "CacheReport"),
    "penstock.tables.table_io": ("LoadedTables",),
}
# Docstrings of classes that the compiler of messages writes.
GENERATED_CODE = {
    "EngineConfig": "The message of a whole configuration, with TensorFlow's message inside (docs/configuration.md)."
}
# Classes whose methods the page lists once, not with every subclass.
PUBLIC_BASES = ("Optimizer",)
# The sections of a docstring: numpydoc's, in its order. LISTED are those with an entry per name.
SECTIONS = ("Parameters", "Attributes", "Returns", "Yields", "Raises", "See Also", "Notes", "References", "Examples")
LISTED = SECTIONS[:5]
SECTION = re.compile(rf"^({'|'.join(SECTIONS)})\n-+\n", re.MULTILINE)
GENERATED = {"reference/api.md": "api", "reference/help.md": "commands"}


def on_files(files: Any, config: Any) -> Any:
    """Add what is generated to what lies in docs/."""
    from mkdocs.structure.files import File

    for uri, maker in GENERATED.items():
        files.append(File.generated(config, uri, content=globals()[maker]()))
    return files


def api() -> str:
    """Every public name with its signature and its docstring."""
    import penstock

    parts = ["# Python names", "", "All of `import penstock as ps`. Names load when they are first used.", ""]
    for name in penstock.__all__:
        value = getattr(penstock, name)
        parts += [f"## {name}", "", *described(name, value)]
        parts += members(public_members(value) if inspect.ismodule(value) else [(name, value)], name)
    for module, names in MODULES.items():
        loaded = importlib.import_module(module)
        parts += [f"## {module}", "", *described(module, loaded)]
        parts += members([(name, getattr(loaded, name)) for name in names], module)
    return "\n".join(parts)


def members(named: list[tuple[str, Any]], parent: str) -> list[str]:
    """The members of a package or class, and their methods."""
    parts = []
    for member, value in named:
        parts += [f"### {member}", "", *described(member, value)] if member != parent else []
        for method, function in public_methods(value):
            parts += [f"### {member}.{method}", "", *described(method, function)]
    return parts


def public_members(package: Any) -> list[tuple[str, Any]]:
    """Functions and classes of a package that penstock itself does not export."""
    import penstock

    names = [name for name in package.__all__ if name not in penstock.__all__]
    named = [(name, getattr(package, name)) for name in names]
    return [(name, value) for name, value in named if inspect.isfunction(value) or inspect.isclass(value)]


def public_methods(value: Any) -> list[tuple[str, Any]]:
    """Documented methods and properties of a class, in the order of the source, without those of a public base."""
    if not inspect.isclass(value) or issubclass(value, BaseException):
        return []
    kinds = [kind for kind in value.__mro__ if kind.__module__.startswith("penstock.")]
    kinds = [kind for kind in kinds if kind is value or kind.__name__ not in PUBLIC_BASES]
    methods = {}
    for name, member in (item for kind in kinds for item in vars(kind).items()):
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        plain = isinstance(function, property) or (inspect.isfunction(function) and function.__name__ == name)
        if plain and not name.startswith("_") and function.__doc__:
            methods.setdefault(name, function)
    return list(methods.items())


# ---- from a docstring to Markdown


def described(name: str, value: Any) -> list[str]:
    """The signature of a name, and its docstring as Markdown."""
    head = ["```python", signature(name, value), "```", ""] if callable(value) else []
    text = inspect.cleandoc(value.__doc__ or GENERATED_CODE.get(name, ""))
    created = inspect.cleandoc(value.__init__.__doc__ or "") if inspect.isclass(value) else ""
    sections = SECTION.search(created)
    if sections and value.__module__.startswith("penstock."):  # of a class whose constructor documents its parameters
        first = SECTION.search(text)
        end = first.start() if first else len(text)
        text = f"{text[:end].rstrip()}\n\n{created[sections.start() :].rstrip()}\n\n{text[end:]}"
    return [*head, *markdown(text)] if text else head


def signature(name: str, value: Any) -> str:
    """``name(…)``, a line per parameter if it is long."""
    try:
        called = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [parameter for parameter in called.parameters.values() if parameter.name not in ("self", "cls")]
    returned = called.empty if inspect.isclass(value) else called.return_annotation
    called = called.replace(parameters=parameters, return_annotation=returned)
    line = tidy(name + str(called))
    if len(line) <= 100:
        return line
    arguments, star = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            arguments.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        arguments.append(tidy(str(parameter)))
    result = "" if returned is called.empty else f" -> {tidy(str(returned))}"
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){result}"])


def tidy(text: str) -> str:
    """A signature without quotes around annotations, and without addresses."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", re.sub(r"<(factory|object|function|class)[^>]*>", "…", text))


def markdown(docstring: str) -> list[str]:
    """The lines of a docstring in numpydoc sections, as Markdown."""
    summary, *parts = SECTION.split(docstring)
    lines = [prose(summary), ""]
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        lines += [f"**{title}**", ""]
        if title == "Examples":
            lines += ["```pycon", re.sub(r"  # doctest: .*", "", body.strip()), "```"]
        elif title == "See Also":
            lines += [
                f"- [`{name}`](#{name.rpartition('.')[2].lower()}): {prose(text)}" for name, text in related(body)
            ]
        elif title in LISTED:
            lines += [listed(*entry) for entry in entries(body)]
        else:
            lines += [prose(body)]
        lines.append("")
    return lines


def entries(body: str) -> list[tuple[str, str]]:
    """The entries of a section, such as ``("ids : array_like", "Repeats allowed.")``."""
    found = re.findall(r"^(\S.*)\n?((?:(?:[ ]+.*)?(?:\n|\Z))*)", body.strip(), re.MULTILINE)
    return [(head, " ".join(text.split())) for head, text in found]


def related(body: str) -> list[tuple[str, str]]:
    """The entries of "See Also": name and text."""
    return [tuple(line.split(" : ", 1)) for line in body.strip().splitlines()]


def listed(head: str, text: str) -> str:
    """One entry as an item of a list."""
    name, _, kind = head.partition(" : ")
    return f"- `{name}`" + (f" ({prose(kind)})" if kind else "") + (f": {prose(text)}" if text else "")


def prose(text: str) -> str:
    """Text with reStructuredText's inline code as Markdown; a page of docs/ becomes a link to it."""
    pieces = re.split(r"``(.*?)``", text.strip(), flags=re.DOTALL)
    for index, piece in enumerate(pieces):
        if index % 2:
            pieces[index] = f"`{piece}`"
        else:
            escaped = re.sub(
                r"^(?!    ).+$", lambda line: re.sub(r"([*<\[\]])", r"\\\1", line[0]), piece, flags=re.MULTILINE
            )
            pieces[index] = re.sub(r"docs/([\w/]+)\.md", r"[\1](../\1.md)", escaped)
    return "".join(pieces)


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

    replays = {"run", "job", "passes"}
    options = [option for option in options_of().values() if option.flag is not None and option.modes & replays]
    if modes != "replay":
        options = [option for option in options if modes in option.modes]
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
