"""What the reference (mkdocstrings) makes of the source: links in docstrings, and signatures that decorators change."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import griffe

# A decorator with another signature than its function's or class's, which only Python can tell.
DECORATORS = re.compile(r"\.(with_options|optimizer_class)$")
LISTED = re.compile(r"^::: (\S+)\n    options:\n(?:      \w+: \w+\n)*      members: \[([^\]]+)\]", re.MULTILINE)
# Name → its place on the site, of every name that the pages list.
PLACES = {
    name: f"{module}.{name}"
    for page in Path(__file__).parent.glob("reference/*.md")
    for module, names in LISTED.findall(page.read_text())
    for name in names.replace(",", "").split()
}


class Reference(griffe.Extension):
    """Changes what griffe reads before mkdocstrings shows it."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        decorators = getattr(obj, "decorators", ())
        if any(DECORATORS.search(decorator.callable_path) for decorator in decorators):
            value = griffe.dynamic_import(obj.path)
            obj.docstring.value = inspect.getdoc(value)
            take_parameters(obj, [parameter(each) for each in inspect.signature(value).parameters.values()])
        elif obj.is_class and any(str(base) == "NamedTuple" for base in obj.bases):
            fields = [each for each in obj.attributes.values() if each.annotation is not None]
            kind = griffe.ParameterKind.positional_or_keyword
            given = [griffe.Parameter(f.name, annotation=f.annotation, kind=kind, default=f.value) for f in fields]
            take_parameters(obj, given)
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        mod.docstring = None  # is about the code


def take_parameters(obj: Any, parameters: list[griffe.Parameter]) -> None:
    """Give a function, or the constructor of a class, these parameters."""
    if obj.is_class:
        function = griffe.Function("__init__", parent=obj)
        obj.set_member("__init__", function)
    else:
        function = obj
    function.parameters = griffe.Parameters(*parameters)


def parameter(given: inspect.Parameter) -> griffe.Parameter:
    """A parameter of ``inspect`` as one of griffe."""
    annotation = None if given.annotation is given.empty else str(given.annotation)
    value = given.default
    default = None if value is given.empty else value.__name__ if inspect.isfunction(value) else repr(value)
    kind = griffe.ParameterKind[given.kind.name.lower()]
    return griffe.Parameter(given.name, annotation=annotation, kind=kind, default=default)


def markdown(text: str) -> str:
    """A docstring with links to pages of docs/ and to names of the reference, and types that griffe reads as text."""
    text = re.sub(r"(?<!`)docs/([\w/]+)\.md", r"[\1](../\1.md)", text)
    text = re.sub(r"``([A-Z]\w+)((?:\.\w+)*)``", link, text)
    text = re.sub(r"^(penstock\.[\w.]+) : ", r"[`\1`][\1]: ", text, flags=re.MULTILINE)  # in See Also
    return re.sub(r"^([\w*, ]+ : )(.+)$", lambda line: line[1] + alternatives(line[2]), text, flags=re.MULTILINE)


def link(code: re.Match[str]) -> str:
    place = PLACES.get(code[1])
    return f"[`{code[1]}{code[2]}`][{place}{code[2]}]" if place else code[0]


def alternatives(kind: str) -> str:
    """A type without commas and braces between alternatives, which griffe would take for a tuple and a default.

    It has defaults from the signature.
    """
    kind = re.sub(r", default .*", "", kind)
    kind = re.sub(r"\{([^}]*)\}", r"\1", kind).replace(", shape ", " of shape ")
    return re.sub(r", (?![^(]*\))", " or ", kind).replace("or or ", "or ")
