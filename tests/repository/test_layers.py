"""The packages that ARCHITECTURE.md draws, what each may import, and the import paths that stay."""

import ast
import functools
import re
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import public_stub
import pytest
from package_layers import ALLOWED, FORMER, ORDER

from penstock.base import integrations

ROOT = Path(__file__).resolve().parents[2]
CYTHON = {".pyx", ".pxd"}
FORMER_PATHS = {*FORMER, "penstock.shared", "penstock.io.targets"}


def once(generator):
    """The results of a generator as a tuple, kept: every test reads all modules."""
    return functools.cache(lambda *arguments: tuple(generator(*arguments)))


@once
def modules():
    folders = {"engine": "penstock", "bench": "penstock.bench", "io": "penstock.io", "pyx": "penstock.pyx"}
    for folder, package in folders.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name.endswith("_pb2.py") or "experiments" in path.parts:  # scripts, not part of the package
                continue
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if (module := ".".join([package, *(p for p in parts if p != "__init__")])) not in FORMER_PATHS:
                yield module, path
    for path in sorted(p for p in (ROOT / "pyx").rglob("*") if p.suffix in CYTHON):  # a header is a separate module
        module = ".".join(("penstock", *path.relative_to(ROOT).with_suffix("").parts))
        yield module + (".pxd" if path.suffix == ".pxd" else ""), path


@once
def imports(path):
    """(module, whether it is loaded at run time) of every import, also under TYPE_CHECKING."""
    if path.suffix in CYTHON:
        yield from ((module, True) for module in cython_imports(path))
        return
    tree, for_types = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for_types.update(id(child) for statement in node.body for child in ast.walk(statement))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "modules are imported by their full name"
            assert node.module != "penstock", f"{path} imports the top-level package"
            yield from ((f"{node.module}.{alias.name}", id(node) not in for_types) for alias in node.names)


def cython_imports(path):
    """Imports and cimports of a kernel; a relative one is of the same package."""
    for line in path.read_text().splitlines():
        match = re.match(r"\s*from\s+(\S+)\s+(c?)import\s+\(?\s*([\w, ]+)", line)
        if match:
            module = re.sub(r"^\.", "penstock.pyx.", match[1])
            if match[2] and module.startswith("penstock."):
                module += ".pxd"
            yield from (f"{module}.{name.split()[0]}" for name in match[3].split(",") if name.strip())
        elif match := re.match(r"\s*c?import\s+(\S+)", line):
            yield match[1]


@functools.cache
def graph():
    """module → the modules that it imports; a name that is imported stands for its module."""
    names = {module for module, _ in modules()}
    arrows = {module: set() for module in names - {"penstock"}}
    for module, path in modules():
        for imported, _ in imports(path):
            target = imported if imported in names else imported.rpartition(".")[0]
            if target in arrows and module in arrows and target != module:
                arrows[module].add(target)
    return arrows


def within(module, prefixes):
    return any(module == p or module.startswith(p + ".") for p in prefixes)


def test_a_library_is_imported_only_where_it_may_be():
    for module, path in modules():
        for imported, is_loaded in imports(path):
            library = imported.split(".")[0]
            if is_loaded and library in ALLOWED:
                packages = {f"penstock.{package}" for package in ALLOWED[library]}
                assert within(module, packages), f"{module} may not import {library}"


def test_no_modules_import_each_other_in_a_circle():
    TopologicalSorter(graph()).prepare()  # raises CycleError, which names them


def picture(arrows):
    """The lines that ARCHITECTURE.md has: each package, and what it imports."""
    imported = {name: set() for name in ORDER}
    for module, targets in arrows.items():
        imported[module.split(".")[1]] |= {target.split(".")[1] for target in targets} - {module.split(".")[1]}
    lines = (f"{name:<12}{'  '.join(other for other in ORDER if other in imported[name])}".rstrip() for name in ORDER)
    return "\n".join(lines)


def running_up(arrows):
    """The arrows from a package to one that stands above it in ORDER, and those into an integration from outside."""
    height = {module: -ORDER.index(module.split(".")[1]) for module in arrows}
    return sorted(
        (module, target) for module, arrow in arrows.items() for target in arrow if height[target] > height[module]
    )


def test_no_import_runs_back_up_to_a_higher_package():
    assert running_up(graph()) == []


def test_only_integrations_import_integrations():
    entering = {(m, t) for m, arrow in graph().items() for t in arrow if within(t, ["penstock.contrib"])}
    assert [arrow for arrow in sorted(entering) if not within(arrow[0], ["penstock.contrib", "penstock.bench"])] == []


def test_only_the_tests_of_integrations_import_their_libraries():
    library = (
        "(confluent_kafka|deltalake|duckdb|flax|h5py|keras|lance|lmdb|nats|opentelemetry|orbax|pandas|polars"
        r"|prometheus_client|pyiceberg|ray|redis|safetensors|tensorflow|torch|tqdm)\b"
    )
    importing = re.compile(rf"^ *(import|from) {library}|importorskip\(\"{library}", re.MULTILINE)
    tests = [path for package in {*ORDER} - {"contrib"} for path in (ROOT / "tests" / package).rglob("*.py")]
    assert len(tests) > 200
    assert [path.name for path in tests if importing.search(path.read_text())] == []


def test_the_architecture_draws_the_imports_between_packages():
    arrows = graph()
    assert {module.split(".")[1] for module in arrows} == set(ORDER)
    assert f"```\n{picture(arrows)}\n```" in (ROOT / "ARCHITECTURE.md").read_text(), picture(arrows)


def test_the_import_paths_of_before_lead_to_the_same_objects():
    for old, new in FORMER.items():
        try:
            module, *targets = map(import_module, (old, *new.split()))
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("penstock"):
                raise
            continue  # a library that is not here
        names = [name for name in vars(module) if not name.startswith("_")]
        assert all(any(getattr(module, n) is getattr(target, n, None) for target in targets) for n in names), old


@pytest.mark.parametrize("name", ["SOURCE", "TARGET", "FORMAT"])
def test_every_integration_is_listed(name):
    declares = re.compile(rf"^{name} = \w+(Kind|Format)\(", re.MULTILINE)
    declaring = {module for module, path in modules() if declares.search(path.read_text())}
    assert set(getattr(integrations, f"{name}S")) == declaring


def test_every_public_name_exists():
    import penstock

    assert all(getattr(penstock, name) is not None for name in penstock.__all__)
    assert {optimizer.__name__ for optimizer in penstock.updates.OPTIMIZERS.values()} <= set(penstock.__all__)
    assert public_stub.STUB.read_text() == public_stub.stub(), "make stub"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = penstock.Nothing
