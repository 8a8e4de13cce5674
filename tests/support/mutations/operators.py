"""Mutations of a module: every small change of its meaning that the operators below can make.

An operator replaces one expression or statement. Annotations, decorators, docstrings and f-strings stay as they are.
A negated condition also stands for swapped branches.
"""

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
LEFT_ALONE = {"annotation", "returns", "decorator_list"}


@dataclass(frozen=True)
class Mutation:
    """One change of a module.

    key : identifies the change in every version of the module that contains the changed code in the same function
    path : of the module, relative to the repository; scope : qualified name of the function; line : counted from 1
    start, end : bytes of the module that ``after`` replaces
    """

    key: str
    path: str
    scope: str
    line: int
    operator: str
    before: str
    after: str
    start: int
    end: int

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutations(path: str, source: bytes) -> Iterator[Mutation]:
    """Yield every mutation of a module, in the order of its lines."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    occurrences: Counter[tuple[str, ...]] = Counter()
    for scope, node, operator, after in _changes(ast.parse(source), ""):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = " ".join(source[start:end].decode().split())
        change = (path, scope, operator, before, after)
        occurrences[change] += 1
        key = hashlib.sha256(repr((*change, occurrences[change])).encode()).hexdigest()[:10]
        yield Mutation(key, path, scope, node.lineno, operator, before, after, start, end)


def _changes(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.expr | ast.stmt, str, str]]:
    """Yield (scope, the node that is replaced, operator, replacement) of a node and everything in it."""
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        scope = f"{scope}.{node.name}" if scope else node.name
    yield from ((scope, *change) for change in _changes_of(node))
    for name, value in ast.iter_fields(node):
        if name not in LEFT_ALONE:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _changes(child, scope)


def _changes_of(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[index] = COMPARISONS[type(op)]()
            yield node, "comparison", f"({ast.unparse(changed)})"
    if isinstance(node, ast.If | ast.While | ast.IfExp) and ast.unparse(node.test) != "TYPE_CHECKING":
        yield node.test, "negation", f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.BoolOp):
        changed_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, "negation", f"({ast.unparse(ast.BoolOp(changed_op, node.values))})"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, "negation", str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, "off by one", str(node.value + 1)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "removed call", "pass"
    if isinstance(node, ast.Call) and len(node.args) > 1:
        first, second, *others = node.args
        if ast.dump(first) != ast.dump(second) and not any(isinstance(arg, ast.Starred) for arg in (first, second)):
            yield node, "swapped arguments", ast.unparse(ast.Call(node.func, [second, first, *others], node.keywords))
