"""Names of variables and classes: LANGUAGE of the code, checked by syntax; in kernels by a regular expression."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("engine", "io", "bench")

# Pronouns, prepositions and participles: as the name of a variable or parameter they do not say what it holds.
REFUSED = {"of", "its", "mine", "some", "about", "given", "what", "where", "one", "at", "found"}

# Parameters and fields that users name: they keep their names.
PUBLIC = {
    "engine/cli/doctor.py found": "a key of the findings in doctor --json",
    "engine/config/lint/findings.py where": "Finding.where",
    "engine/config/placement.py where": "Placement(where=…)",
    "engine/metrics.py of": "Metrics.plain(of=…)",
}

# Names that several classes share, with the reason.
SHARED_NAMES = {
    "Embedding": 3,  # public: of Flax in functional.nnx_embedding, of Keras in functional.keras_embedding, of torch
    "Step": 2,  # public: of torch; and a step of the bench's workloads
}


def trees(folder):
    """Yield (path, syntax tree) of every module of a folder, except generated ones."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def bound_names(tree):
    """Yield (name, line) of every variable and parameter: also of loops, comprehensions, imports and patterns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None:
            yield node.name, node.lineno
        elif isinstance(node, ast.alias) and node.asname is not None:
            yield node.asname, node.lineno


@pytest.mark.parametrize("folder", [*FOLDERS, "tests"])
def test_no_variable_is_named_by_a_pronoun_preposition_or_participle(folder):
    places = [(path, line, name) for path, tree in trees(folder) for name, line in bound_names(tree)]
    refused = [
        f"{path}:{line} {name}" for path, line, name in places if name in REFUSED and f"{path} {name}" not in PUBLIC
    ]
    public = {place for place in PUBLIC if place.startswith(folder)}
    assert len(places) > 1000
    assert public <= {f"{path} {name}" for path, _, name in places}
    assert refused == []


@pytest.mark.parametrize(
    "code",
    [
        "of = 1",
        "a, (b, *its) = c",
        "mine: int = 1",
        "some += 1",
        "if (found := f()): pass",
        "for at in range(3): pass",
        "[one for one in ones]",
        "def f(a, *, where=None): pass",
        "def f(*given): pass",
        "lambda what: what",
        "with f() as about: pass",
        "try: pass\nexcept OSError as given: pass",
        "match a:\n    case [1, *found]: pass",
        "import numpy as at",
    ],
)
def test_every_way_to_bind_a_name_is_seen(code):
    assert {name for name, _ in bound_names(ast.parse(code))} & REFUSED


def test_attributes_keywords_and_functions_may_have_these_names():
    code = "a.at[i].get(where=1, about=f.found)\ndef of(): pass"
    assert {name for name, _ in bound_names(ast.parse(code))} & REFUSED == set()


# A declaration, the target of an assignment or of a loop, or a parameter.
NAMES = "|".join(sorted(REFUSED))
BOUND_IN_KERNELS = re.compile(
    rf"\bcdef [^(=]*?\b({NAMES})\b"
    rf"|(?:^|[,(]\s*|\bfor )(?:const )?(?:[\w.\[\]:,]+[ *]+)?({NAMES})(?=,|\)|=| in\b| not None| [-+*/|&]?= )",
    re.MULTILINE,
)


def bound_in_kernel(text):
    """Return the refused names that the source of a kernel binds, outside of docstrings and comments."""
    code = re.sub(r'"""(?:.|\n)*?"""|"[^"\n]*"|#.*', "", text)
    return {first or second for first, second in BOUND_IN_KERNELS.findall(re.sub(r"^ +", "", code, flags=re.MULTILINE))}


def test_no_variable_of_a_kernel_is_named_so():
    kernels = [path for path in (ROOT / "pyx").rglob("*") if path.suffix in (".pyx", ".pxd")]
    assert len(kernels) > 30
    refused = {str(path.relative_to(ROOT)): bound_in_kernel(path.read_text()) for path in kernels}
    assert {path: names for path, names in refused.items() if names} == {}


@pytest.mark.parametrize(
    "code",
    [
        "cdef Shards* of = &self.shards",
        "cdef Py_ssize_t i, at, n = 0",
        "    cdef size_t at",
        "cdef int find(const Shards* of, int64_t key) noexcept nogil:",
        "def f(self, one, two):",
        "    for at in range(n):",
        "found = np.empty(n)",
        "    found += 1",
        "rows, mine = pair",
        "def f(int64_t[::1] given not None):",
    ],
)
def test_ways_to_bind_a_name_in_a_kernel_are_seen(code):
    assert bound_in_kernel(code)


def test_class_names_are_unique():
    places = defaultdict(list)
    for folder in FOLDERS:
        for path, tree in trees(folder):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(path))
    assert len(places) > 400
    assert {name: paths for name, paths in places.items() if len(paths) > SHARED_NAMES.get(name, 1)} == {}
