"""The site's pages of Python names: one per group, made of signatures and of docstrings in numpydoc sections.

mkdocs calls ``on_files`` (mkdocs.yml); tests call the other functions. A group lists modules, and a page has all public
names of them, so that a new name needs no entry here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import penstock

# Public names that neither ``import penstock`` nor the ``__all__`` of a public package offers.
MODULES = {
    "penstock.accumulators.frame_gate": ("FrameGate",),
    "penstock.config.specs": ("TableSpec",),
    "penstock.functional.keras_embedding": ("Embedding", "PreparedBatches"),
    "penstock.functional.nnx_embedding": ("Embedding",),
    "penstock.io.flight": ("Client", "Producer", "Ack", "Delta", "TableAt", "LookupResult"),
    "penstock.io.log": ("LogWriter",),
    "penstock.io.quarantine": ("QuarantineWriter",),
    "penstock.io.targets.follower": ("Follower", "Progress"),
    "penstock.io.targets.target": ("Target", "Stored", "TableRows"),
    "penstock.metrics": ("Metrics",),
    "penstock.shared.table_writer": ("SharedWriter", "SharedTable"),
    "penstock.shares": ("Router",),
    "penstock.stats": ("KeyReport", "CacheReport"),
    "penstock.tables.table_io": ("LoadedTables",),
}
# Packages whose ``__all__`` is public.
PACKAGES = ("bridge", "functional", "ray", "torch", "updates")
# Libraries that modules of a group import at once, and that the machine that builds the site may lack.
LIBRARIES = ("flax", "keras", "prometheus_client", "torch")


class Group(NamedTuple):
    """A page. text : what it has, and which pages explain it"""

    title: str
    text: str
    modules: tuple[str, ...]


GROUPS = {
    "engine": Group(
        "Engine",
        "An engine holds the tables, takes gradients and updates rows. Begin with `Engine.run` for a stream "
        "([Replay a log](../tutorials/replay.md)), `Engine.stage` for a stream of changed rows "
        "([A stage](../tutorials/stage.md)), or `Engine.apply` for arrays ([Train a small "
        "model](../tutorials/training.md)).",
        (
            "penstock.engine",
            "penstock.stats",
            "penstock.tables.table_io",
            "penstock.activations.coo",
            "penstock.activations.deduplication",
            "penstock.dataflow",
            "penstock.checkpoint.versions",
            "penstock.metrics",
        ),
    ),
    "configuration": Group(
        "Configuration",
        "Tables, features, initial values and placement ([Configuration](../configuration.md), [Dynamic "
        "tables](../dynamic.md), [Where rows live](../placement.md)).",
        (
            "penstock.config.embedding",
            "penstock.config.tables",
            "penstock.config.features",
            "penstock.config.dynamic",
            "penstock.config.placement",
            "penstock.config.engine_config_pb2",
            "penstock.config.lint.findings",
            "penstock.config.specs",
        ),
    ),
    "optimizers": Group(
        "Optimizers",
        "The classes that a configuration takes, and below them their equations as functions of arrays "
        "([Optimizers](../optimizers.md)).",
        ("penstock.updates",),
    ),
    "functional": Group(
        "Tables in your own step",
        "Tables that your program looks up and updates inside a jitted step of JAX, Flax or Keras ([Tables in your own "
        "step](../functional.md)).",
        (
            "penstock.functional",
            "penstock.functional.nnx_embedding",
            "penstock.functional.keras_embedding",
            "penstock.bridge",
        ),
    ),
    "torch": Group(
        "Torch",
        "torch's modules over an engine or a service; needs `pip install 'penstock[torch]'` ([Torch](../torch.md), "
        "[From torch](../tutorials/from_torch.md)).",
        ("penstock.torch",),
    ),
    "service": Group(
        "Services and readers",
        "Clients of `penstock serve` ([The Flight service](../serve.md)), followers and their targets ([Follow a "
        "service](../follow.md)), and readers of shared files ([Read while they train](../readers.md)).",
        (
            "penstock.io.flight",
            "penstock.io.targets.follower",
            "penstock.io.targets.target",
            "penstock.shared.table_reader",
            "penstock.shared.table_writer",
        ),
    ),
    "streams": Group(
        "Logs, bad rows and ids",
        "Files with checksums ([The log format](../log.md)), rejected rows ([Bad rows](../bad_rows.md)), and strings "
        "as ids ([Neighbours](../neighbours.md)).",
        ("penstock.io.log", "penstock.io.quarantine", "penstock.io.decoding.string_ids"),
    ),
    "accumulators": Group(
        "Conditional accumulators",
        "TensorFlow's conditional accumulators, and the gate as a separate object ([Conditional "
        "accumulators](../accumulators.md)).",
        ("penstock.accumulators", "penstock.accumulators.frame_gate"),
    ),
    "jobs": Group(
        "Jobs of several machines",
        "Jobs on a Ray cluster ([Ray](../ray.md)), and frames routed by owner ([Shares](../shares.md)).",
        ("penstock.ray", "penstock.shares"),
    ),
    "errors": Group(
        "Errors",
        "Every error that a user can cause is a `PenstockError`, and also a builtin kind. [Commands](../cli.md) lists "
        "the exit code of each.",
        ("penstock.errors",),
    ),
}
# What has no docstring: data, and a class that the compiler of messages writes.
TEXTS = {
    "EngineConfig": "The message of a whole configuration, with TensorFlow's message inside (docs/configuration.md).",
    "LearningRate": "What optimizers take: a number, a function of the global step, or a ``DynamicLearningRate``.",
    "OPTIMIZERS": "Every optimizer's class by its member of ``OptimizationParameters.parameters``.",
    "OWN_OPTIMIZERS": "The members that TensorFlow's message lacks.",
    "UPDATES": "Every equation by its member of ``OptimizationParameters.parameters``.",
    "WITHOUT_FORMULA": "The members that can be loaded and saved, but not run: no formula is public.",
}
# Classes whose methods the site lists once, not with every subclass.
PUBLIC_BASES = ("Optimizer",)
# Methods that torch and Keras call, not users.
CALLED_BY_LIBRARIES = ("call", "compute_output_spec", "from_config", "get_config", "get_extra_state")
CALLED_BY_LIBRARIES += ("load_own_variables", "save_own_variables", "set_extra_state")
# The sections of a docstring: numpydoc's, in its order. LISTED are those with an entry per name.
SECTIONS = ("Parameters", "Attributes", "Returns", "Yields", "Raises", "See Also", "Notes", "References", "Examples")
LISTED = SECTIONS[:5]
SECTION = re.compile(rf"^({'|'.join(SECTIONS)})\n-+\n", re.MULTILINE)


class Entry(NamedTuple):
    """A name of a page. path : where it is imported from; label : its heading, unique on the page"""

    path: str
    label: str
    value: Any


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to the files of docs/."""
    from mkdocs.structure.files import File

    sys.meta_path.append(StandIns())
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the list of groups into the page that has its place."""
    items = [f"- [{group.title}]({name}.md): {group.text}" for name, group in GROUPS.items()]
    return markdown.replace("<!-- groups -->", "\n".join(items))


def pages() -> dict[str, str]:
    """Return group → its page, as Markdown."""
    return {name: page(group) for name, group in GROUPS.items()}


def page(group: Group) -> str:
    """Return the page of a group: the list of its names, then each with its methods."""
    parts = [f"# {group.title}", "", group.text, ""]
    for entry in entries_of(group):
        summary = docstring(entry.label, entry.value).partition("\n\n")[0]
        parts.append(f"- [`{entry.label}`](#{entry.label}): {prose(summary)}")
    for entry in entries_of(group):
        parts += ["", f"## {entry.label} {{ #{entry.label} }}", "", *described(entry.path, entry.value)]
        for method, function in public_methods(entry.value):
            name = method.strip("_")  # in attributes, Markdown would make __call__ bold
            shown = f"{entry.label}.{method}".replace("__", r"\_\_")
            heading = f'### {shown} {{ #{entry.label}.{name} data-toc-label="{name}" }}'
            parts += ["", heading, "", *described(f"{entry.path.rpartition('.')[2]}.{method}", function)]
    return "\n".join([*parts, ""])


@functools.cache
def entries_of(group: Group) -> list[Entry]:
    """Return the names of a group."""
    named = [(module, name) for module in group.modules for name in names_in(module)]
    names = [name for _, name in named]
    entries = []
    for module, name in named:
        path = f"penstock.{name}" if name in penstock.__all__ else f"{module}.{name}"
        label = name if names.count(name) == 1 else f"{module.rpartition('.')[2]}.{name}"
        entries.append(Entry(path, label, getattr(importlib.import_module(module), name)))
    return sorted(entries, key=lambda entry: entry.path.count(".") > 1)  # names of ``import penstock`` first


def names_in(module: str) -> list[str]:
    """Return the public names of a module."""
    lazy = [name for name, loaded in penstock._MODULES.items() if loaded == module]
    names = [*lazy, *MODULES.get(module, ())]
    if module.removeprefix("penstock.") in PACKAGES:
        names = [*importlib.import_module(module).__all__, *names]
    return list(dict.fromkeys(names))


def public_methods(value: Any) -> list[tuple[str, Any]]:
    """Documented methods of a class, then properties, in the order of the source, without those of a public base."""
    if not inspect.isclass(value) or issubclass(value, BaseException):
        return []
    kinds = [kind for kind in value.__mro__ if kind.__module__.startswith("penstock.")]
    kinds = [kind for kind in kinds if kind is value or kind.__name__ not in PUBLIC_BASES]
    methods = {}
    for name, member in (item for kind in kinds for item in vars(kind).items()):
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        plain = isinstance(function, property) or (inspect.isfunction(function) and function.__name__ == name)
        public = name == "__call__" or not name.startswith("_")
        if plain and public and name not in CALLED_BY_LIBRARIES and function.__doc__:
            methods.setdefault(name, function)
    return sorted(methods.items(), key=lambda item: isinstance(item[1], property))


# ---- libraries that are not installed


class StandIn:
    """Any attribute of a library that is not installed: a base class, a decorator, or an annotation."""

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, item: Any) -> StandIn:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class StandIns:
    """A finder, after all others, of the modules of LIBRARIES: signatures and docstrings need none of them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in LIBRARIES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = StandIn().__getattr__  # type: ignore[method-assign]


# ---- from a docstring to Markdown


def docstring(name: str, value: Any) -> str:
    """The docstring, with the sections of a constructor that documents the parameters."""
    if name in TEXTS:
        return TEXTS[name]
    text = inspect.cleandoc(value.__doc__ or "")
    created = inspect.cleandoc(value.__init__.__doc__ or "") if inspect.isclass(value) else ""
    sections = SECTION.search(created)
    if sections and value.__module__.startswith("penstock."):
        first = SECTION.search(text)
        end = first.start() if first else len(text)
        text = f"{text[:end].rstrip()}\n\n{created[sections.start() :].rstrip()}\n\n{text[end:]}"
    return text


def described(path: str, value: Any) -> list[str]:
    """The signature of a name, and its docstring as Markdown."""
    text = docstring(path.rpartition(".")[2], value)
    return ["```python", signature(path, value), "```", "", *(markdown(text) if text else [])]


def signature(name: str, value: Any) -> str:
    """``name(…)``, a line per parameter if it is long; of a property, its type."""
    if isinstance(value, property):
        return tidy(f"{name}: {inspect.signature(value.fget).return_annotation}")
    try:
        called = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [parameter for parameter in called.parameters.values() if parameter.name not in ("self", "cls")]
    returned = called.empty if inspect.isclass(value) else called.return_annotation
    called = called.replace(parameters=parameters, return_annotation=returned)
    line = tidy(name + str(called))
    if len(line) <= 80:
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


def markdown(text: str) -> list[str]:
    """The lines of a docstring in numpydoc sections, as Markdown."""
    summary, *parts = SECTION.split(text)
    lines = [prose(summary), ""]
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        lines += [f"**{title}**", ""]
        if title == "Examples":
            lines += ["```pycon", re.sub(r"  # doctest: .*", "", body.strip()), "```"]
        elif title == "See Also":
            lines += [f"- {prose(f'``{name}``')}: {prose(meaning)}" for name, meaning in related(body)]
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
    """Text with reStructuredText's inline code as Markdown; names and pages of docs/ become links to them."""
    pieces = re.split(r"``(.*?)``", text.strip(), flags=re.DOTALL)
    for index, piece in enumerate(pieces):
        if index % 2:
            target = targets().get(piece)
            pieces[index] = f"[`{piece}`]({target})" if target else f"`{piece}`"
        else:
            escaped = re.sub(
                r"^(?!    ).+$", lambda line: re.sub(r"([*<\[\]])", r"\\\1", line[0]), piece, flags=re.MULTILINE
            )
            escaped = re.sub(r"::(?=\n\n    |\Z)", ":", escaped)
            pieces[index] = re.sub(r"docs/([\w/]+)\.md", r"[\1](../\1.md)", escaped)
    return "".join(pieces)


@functools.cache
def targets() -> dict[str, str]:
    """Return inline code that names a class, or something by its class or module → its place on the site."""
    places: dict[str, list[str]] = {}
    for page_name, group in GROUPS.items():
        for entry in entries_of(group):
            place = f"{page_name}.md#{entry.label}"
            spelled = {entry.path, entry.label} if "." in entry.label or entry.label[0].isupper() else {entry.path}
            for name in spelled:
                places.setdefault(name, []).append(place)
            for method, _ in public_methods(entry.value):
                places.setdefault(f"{entry.label}.{method}", []).append(f"{place}.{method}")
    return {name: found[0] for name, found in places.items() if len(found) == 1}
