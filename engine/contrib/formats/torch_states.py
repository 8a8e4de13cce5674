"""The state of an optimizer of torch by the names of its parameters: ``state.0.sum`` becomes ``state.user.weight.sum``.

torch counts the parameters in ``state``. Its ``param_groups`` have their numbers, and their names where the optimizer
was created with ``named_parameters``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from penstock.base.errors import InputError
from penstock.io.table_formats.table_format import Contents, OptimizerState

_LARGEST = sys.float_info.max
_IN_GROUP = re.compile(r"((?:.+\.)?)param_groups\.(\d+)\.(.+)")
Names = dict[str, dict[str, str]]  # path of an optimizer → number of a parameter → its name


class Group(NamedTuple):
    """Parameters of an optimizer. path : of the optimizer, with a dot at its end; number : among ``param_groups``"""

    path: str
    number: int | str
    params: Any
    names: Any


def with_names(contents: Contents, groups: Iterable[Group], source: str) -> Contents:
    """Return the contents with the names of parameters in place of their numbers. Raises InputError."""
    names = _names(groups, source)
    tensors, numbered = {}, {}
    for name, tensor in contents.tensors.items():
        own = _name(name, names)
        if own in tensors or (own != name and own in contents.tensors):
            raise InputError(f"'{own}' is two of its tensors; save one of them", source=source)
        tensors[own] = tensor
        if own != name:
            numbered[name] = own
    return Contents(tensors, {_name(name, names): kind for name, kind in contents.others.items()}, numbered)


def states_of(contents: Contents, plain: Mapping[str, Any]) -> dict[str, OptimizerState]:
    """Return what the tensors of optimizers' states belong to. plain : the numbers, switches and texts, by their paths

    A tensor ``optim.state.0.sum`` has its step in ``optim.state.0.step``, and its settings in the group among
    ``optim.param_groups`` that has 0 among its ``params``.
    """
    settings: dict[str, dict[str, float]] = {}
    group_of: dict[tuple[str, str], str] = {}
    for name, value in plain.items():
        if (match := _IN_GROUP.fullmatch(name)) is None:
            continue
        path, group, rest = match[1], match[2], match[3]
        if rest.startswith("params."):
            group_of[path, str(value)] = group
        elif not isinstance(value, str) and abs(value) <= _LARGEST:
            settings.setdefault(f"{path}{group}", {})[rest] = float(value)
    states, numbers = {}, {name: number for number, name in contents.numbered.items()}
    for name in contents.tensors:
        place = numbers.get(name, name).rpartition(".")[0]
        before, state, param = f".{place}".rpartition(".state.")
        path = f"{before}.".removeprefix(".")
        while param and (path, param) not in group_of:  # in torchrec, "state.user.weight.user" of "user.weight"
            param = param.rpartition(".")[0]
        group = settings.get(f"{path}{group_of[path, param]}", {}) if state and param else {}
        step = _whole(plain.get(f"{place}.step"))
        if group or step is not None:
            states[name] = OptimizerState(step, group)
    return states


def _whole(step: Any) -> int | None:
    return int(step) if isinstance(step, int | float) and 0 <= step < 2**63 else None


def _names(groups: Iterable[Group], source: str) -> Names:
    names: Names = {}
    for group in groups:
        known = names.setdefault(group.path, {})
        lists = isinstance(group.params, list) and isinstance(group.names, list)
        if lists and len(group.params) == len(group.names) and all(isinstance(name, str) for name in group.names):
            num_known = len(known) + len(group.params)
            known.update(zip(map(str, group.params), group.names, strict=True))
            if len(set(known.values())) == num_known:
                continue
        place = f"'{group.path}param_groups.{group.number}.param_names'"
        problem = "expected a list with a name for each of 'params', and no name twice"
        raise InputError(f"{place}: {problem}; without 'param_names' states have numbers", source=source)
    return names


def _name(numbered: str, names: Names) -> str:
    for prefix, known in names.items():
        if numbered.startswith(f"{prefix}state."):
            number, dot, rest = numbered.removeprefix(f"{prefix}state.").partition(".")
            if dot and number in known:
                return f"{prefix}state.{known[number]}.{rest}"
    return numbered


def groups_of(tree: Any, path: str = "") -> Iterator[Group]:
    """Yield every group with names in nested dicts and lists, of optimizers whose states are numbered."""
    if isinstance(tree, Mapping):
        state, groups = tree.get("state"), tree.get("param_groups")
        is_numbered = isinstance(state, Mapping) and any(isinstance(key, int) for key in state)
        for number, group in enumerate(groups if isinstance(groups, list) and is_numbered else ()):
            if isinstance(group, Mapping) and "param_names" in group:
                yield Group(path, number, group.get("params"), group["param_names"])
        items = list(tree.items())
    else:
        items = list(enumerate(tree)) if isinstance(tree, list | tuple) else []
    for key, value in items:
        yield from groups_of(value, f"{path}{key}.")
