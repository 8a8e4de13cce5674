"""Sources and targets declare themselves: help, errors, extras, pages and what is loaded follow from it."""

import subprocess
import sys

import pytest
from cli import table

from penstock.io.partitions.partition_source import topic_kinds
from penstock.io.sources.source_kinds import source_kind, source_kinds
from penstock.serving.followers.target_kinds import target_kind, target_kinds

CONFIG = table(rows=8)
KINDS = [*source_kinds(), *target_kinds()]
NEEDING_A_LIBRARY = [kind for kind in KINDS if kind.library]


def title(kind):
    return f"{kind.title} {kind.page}"


def help_of(command):
    done = subprocess.run([sys.executable, "-m", "penstock", command, "--help"], capture_output=True, text=True)
    return "".join(done.stdout.split())


def test_schemes_are_unique():
    for kinds in (source_kinds(), target_kinds()):
        schemes = [scheme for kind in kinds for scheme in kind.schemes]
        assert len(schemes) == len(set(schemes)) > len(kinds) - 2
    assert all(source_kind(kind.example) is kind for kind in source_kinds())
    assert all(target_kind(kind.example) is kind for kind in target_kinds())


@pytest.mark.parametrize("kind", NEEDING_A_LIBRARY, ids=title)
def test_a_library_that_is_missing_is_named(kind, tmp_path, monkeypatch, refused):
    (tmp_path / "t.pbtxt").write_text(CONFIG)
    module = kind.library.module
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    follow = ("follow", "grpc://127.0.0.1:1", "--into", kind.example)
    words = ("replay", tmp_path / "t.pbtxt", kind.example) if kind in source_kinds() else follow
    line = refused(2, *words)
    expected = f"needs the package {module}: pip install 'penstock[{kind.library.extra}]'\n"
    assert line.startswith(f"penstock: {kind.example.partition(':')[0]}:")
    assert line.endswith(expected)


def test_help_names_every_kind():
    replay, follow, serve = help_of("replay"), help_of("follow"), help_of("serve")
    assert all(kind.form in replay for kind in source_kinds())
    assert all(kind.form in follow for kind in target_kinds())
    assert all(kind.flag in serve for kind in topic_kinds())


def test_an_unknown_scheme_is_answered_with_the_known_ones(tmp_path, refused):
    (tmp_path / "t.pbtxt").write_text(CONFIG)
    line = refused(3, "replay", tmp_path / "t.pbtxt", "gopher://host/rows")
    assert line.startswith("penstock: gopher://host/rows: unknown scheme; expected a URI of pyarrow.fs, ")
    assert all(kind.form in line for kind in source_kinds())
    line = refused(2, "follow", "grpc://127.0.0.1:1", "--into", "gopher://host/rows")
    assert line.startswith("penstock: --into gopher://host/rows: expected ")
    assert all(kind.form in line for kind in target_kinds())


def test_only_flights_load_grpc():
    code = """
import sys
from penstock.base.errors import PenstockError
from penstock.io.sources.opening import open_sources
from penstock.io.sources.source_kinds import source_kinds
for kind in sorted(source_kinds(), key=lambda kind: "grpc://" in kind.schemes):
    try:
        open_sources([kind.example], patience_s=0)
    except PenstockError:
        pass
    print(kind.title, "pyarrow.flight" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loads = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert loads == {kind.title: str("grpc://" in kind.schemes) for kind in source_kinds()}
