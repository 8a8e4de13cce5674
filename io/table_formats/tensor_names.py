"""Find the tensors of a source that are the weights, slots and keys of tables: by name; then check shape and type.

A tensor's name ends with the name of a table, followed by that of a part: ``model.embedding_bags.user.weight`` in
TorchRec, ``user.momentum1`` in its fused optimizer, ``embedding/user/accumulators`` in TensorFlow,
``layers/user/vars/0`` in Keras, ``user/embedding/value`` in Flax NNX, ``user/parameters`` and ``user/keys`` in
penstock. In the state of optax the slot's name is before the table's: ``opt_state/0/mu/user/embedding``. Names that
differ are given by ``--map``, singly or by a pattern.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.base.errors import InputError, UsageError, listed
from penstock.io.table_formats.table_format import Contents, Tensor
from penstock.model.config.specs import WEIGHTS

KEYS = "keys"
_WEIGHTS = (WEIGHTS, "weight", "weights", "embedding", "embeddings", "embeddings:0", "vars/0", "value")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_ADAGRAD = {"accumulators": ("momentum1", "momentum_1", "sum", "Adagrad")}

# Optimizer → slot → its names in FBGEMM and TorchRec (momentum1, momentum2), torch.optim, and TensorFlow's first
# TPUEmbedding (such as Adam/m). A slot is listed only if the other library stores the same numbers.
OTHER_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Adagrad": _ADAGRAD,
    "RowWiseAdagrad": _ADAGRAD,
    "TorchAdagrad": {"sum": ("momentum1", "momentum_1")},
    "PartialRowWiseAdam": {
        "exp_avg": ("momentum1", "momentum_1"),
        "exp_avg_sq": ("momentum2", "momentum_2"),
    },
    "AdagradMomentum": {"accumulators": ("AdagradMomentum/Accumulator",), "momenta": ("AdagradMomentum/Momentum",)},
    "ProximalAdagrad": {"accumulators": ("ProximalAdagrad",)},
    "Momentum": {"momenta": ("momentum_buffer", "Momentum")},
    "Adam": {
        "momenta": ("momentum1", "momentum_1", "exp_avg", "Adam/m"),
        "velocities": ("momentum2", "momentum_2", "exp_avg_sq", "Adam/v"),
    },
    "FTRL": {"accumulators": ("Ftrl",), "linears": ("Ftrl_1",)},
    "RMSProp": {"ms": ("square_avg", "RMSProp/ms"), "mom": ("RMSProp/mom",)},
    "Adadelta": {"accumulators": ("square_avg",), "updates": ("acc_delta",)},
    "ProximalYogi": {"v": ("ProximalYogi",), "m": ("ProximalYogi_1",)},
}

# The optimizer of a table that an import chooses by the slots there; a first one is a sum, unless there is a second.
ANY_OF_TORCH = "any of torch's"
_OF_TORCH = {"sum": ("momentum1", "momentum_1"), "exp_avg_sq": ("momentum2", "momentum_2")}

# Optimizer → slot → its name in optax, which stores the same numbers.
OPTAX_NAMES: Mapping[str, Mapping[str, str]] = {
    "Adagrad": {"accumulators": "sum_of_squares"},
    "Momentum": {"momenta": "trace"},
    "Adam": {"momenta": "mu", "velocities": "nu"},
    "Lion": {"momenta": "mu"},
    "RMSProp": {"ms": "nu"},
    "Adadelta": {"accumulators": "e_g", "updates": "e_x"},
}
_SLOTS = {word for slots in OTHER_NAMES.values() for slot, names in slots.items() for word in (slot, *names)}
_OPTAX = sorted({name for slots in OPTAX_NAMES.values() for name in slots.values()})
_OPTAX_STATE = re.compile(rf"(?:^|[./])(?:\d+|\w*state)[./]({'|'.join(_OPTAX)})[./]")


@dataclass(frozen=True)
class WantedTable:
    """A table of the configuration.

    optimizer : the name of its class
    dims : floats per row of the weights and of each slot, by name
    num_rows : None if it is dynamic; key_type : of a dynamic table
    positive : the slot that must be positive, because the optimizer divides by it without an epsilon
    """

    name: str
    optimizer: str
    dims: Mapping[str, int]
    num_rows: int | None
    key_type: str | None = None
    positive: str | None = None

    def names(self, part: str) -> tuple[str, ...]:
        """Return the names that a part may have."""
        if part == WEIGHTS:
            return _WEIGHTS
        others = _OF_TORCH if self.optimizer == ANY_OF_TORCH else OTHER_NAMES.get(self.optimizer, {})
        return (part, *others.get(part, ()))


class Assigned(NamedTuple):
    """The tensors that will be read, and why others are not.

    parts : table → part (or KEYS) → name of the tensor; skipped : name → reason
    """

    parts: dict[str, dict[str, str]]
    skipped: dict[str, str]


def assign(
    contents: Contents, wanted: Mapping[str, WantedTable], names: Mapping[str, str], source: str, checked: bool = True
) -> Assigned:
    """Assign tensors to the parts of tables.

    names : name of a tensor → TABLE or TABLE/SLOT; name of a table in the source → TABLE; or patterns of both
    checked : check their types and shapes
    Raises UsageError for an invalid name among ``names``, and InputError for tensors that do not fit.
    """
    tensors = contents.tensors
    mapped, source_names = _mapped(tensors, wanted, without_patterns(tensors, wanted, _renamed(names, contents)))
    taken_names = set(source_names.values())
    source_names = {name: name for name in wanted if name not in taken_names} | source_names
    candidates: dict[tuple[str, str], list[tuple[str, str]]] = {}
    skipped: dict[str, str] = {}
    for name in tensors:
        if name in mapped:
            continue
        matches = [
            (prefix, table.name, part)
            for table in (wanted[table_name] for table_name in source_names)
            for part, prefix in _parts_and_prefixes(name, table, source_names[table.name])
        ]
        if not matches:
            skipped[name] = "no table of the configuration has such a name"
            continue
        prefix, table_name, part = min(matches, key=lambda match: len(match[0]))  # "a.user" before "user"
        candidates.setdefault((table_name, part), []).append((prefix, name))
    parts: dict[str, dict[str, str]] = {}
    for name, (table_name, part) in mapped.items():
        parts.setdefault(table_name, {})[part] = name
    for (table_name, part), pairs in candidates.items():
        if part not in wanted[table_name].dims and part != KEYS:
            reason = f"table '{table_name}' ({wanted[table_name].optimizer}) has no such slot"
            skipped |= {name: reason for _, name in pairs}
            continue
        tensor = parts.setdefault(table_name, {}).get(part) or _choice(pairs, table_name, part, source)
        parts[table_name][part] = tensor
        skipped |= {name: f"'{tensor}' is read for the same part" for _, name in pairs if name != tensor}
    in_order = {
        name: {part: parts[name][part] for part in (*table.dims, KEYS) if part in parts[name]}
        for name, table in wanted.items()
        if name in parts
    }
    for name, by_part in in_order.items() if checked else ():
        _check(tensors, wanted[name], by_part, source)
    return Assigned(in_order, skipped)


def _renamed(names: Mapping[str, str], contents: Contents) -> dict[str, str]:
    """Return ``names`` with the tensors' names in place of their numbers. Raises UsageError for one given by both."""
    renamed: dict[str, str] = {}
    for name, target in names.items():
        own = contents.numbered.get(name, name)
        if own in renamed:
            raise UsageError(f"{_flag(name, target)}: '{own}' is given twice, by its name and by its number")
        renamed[own] = target
    return renamed


def without_patterns(
    there: Collection[str], wanted: Mapping[str, WantedTable], names: Mapping[str, str]
) -> dict[str, str]:
    """Return ``names`` with each pattern replaced by the names that it stands for, except for what others name.

    there : the names in the source
    The ``*`` of a pattern stands for the same text in NAME and in a table's name; in NAME also for the path to the
    table's weights, which ends with that text. Raises UsageError for a pattern that is invalid, or stands for nothing.
    """
    result = {name: target for name, target in names.items() if "*" not in name or name in there}
    exact, exact_places = set(result), {_place(target, wanted) for target in result.values()}
    taken: dict[tuple[str, str], str] = {}
    for pattern, target in names.items():
        if pattern in result:
            continue
        if pattern.count("*") != 1 or target.count("*") != 1:
            raise UsageError(f"{_flag(pattern, target)}: expected one * on each side, which stands for the same text")
        found = _found(pattern, _texts(pattern, target, wanted), there, wanted)
        if not found:
            raise UsageError(f"{_flag(pattern, target)}: matches nothing in the source; it has {listed(there)}")
        for (table, part), names_there in found.items():
            matches = [name for name in names_there if name not in exact]
            if not matches or (table, part) in exact_places:
                continue
            place = table if part == WEIGHTS else f"{table}/{part}"
            if len(matches) > 1:
                problem = f"{listed(matches)} would all be {place}; choose one: --map NAME={place}"
                raise UsageError(f"{_flag(pattern, target)}: {problem}")
            (name,) = matches
            if result.get(name, place) != place:
                problem = f"'{name}' would be {place}, and by another --map {result[name]}"
                raise UsageError(f"{_flag(pattern, target)}: {problem}")
            if taken.setdefault((table, part), name) != name:
                problem = f"'{name}' would be {place}, and so would '{taken[table, part]}' by another --map"
                raise UsageError(f"{_flag(pattern, target)}: {problem}")
            result[name] = place
    return result


def _texts(pattern: str, target: str, wanted: Mapping[str, WantedTable]) -> dict[tuple[str, str], str]:
    """Return (table, part) → the text that ``*`` stands for, of what TARGET may be. Raises UsageError for nothing."""
    texts: dict[tuple[str, str], str] = {}
    rest, _, slot = target.rpartition("/")
    for tables, part in ((target, WEIGHTS), (rest, slot)):
        before, star, after = tables.partition("*")
        for name, table in wanted.items():
            has = part in table.dims or (part == KEYS and table.key_type is not None)
            if star and has and len(name) > len(before + after) and name.startswith(before) and name.endswith(after):
                texts[name, part] = name[len(before) : len(name) - len(after)]
    if not texts:
        raise _no_target(pattern, target, wanted)
    return texts


def _found(
    pattern: str, texts: Mapping[tuple[str, str], str], there: Collection[str], wanted: Mapping[str, WantedTable]
) -> dict[tuple[str, str], list[str]]:
    """Return (table, part) → the names in the source that the pattern stands for. texts : see ``_texts``"""
    found: dict[tuple[str, str], list[str]] = {}
    for (table, part), text in texts.items():
        name = pattern.replace("*", text)
        if name in there or (part == WEIGHTS and _names_table(name, wanted[table], there)):
            found[table, part] = [name]
    form = re.compile("(.+)".join(map(re.escape, pattern.split("*"))), re.DOTALL)
    paths: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name in there:
        if (match := form.fullmatch(name)) is None:
            continue
        matches = [
            (prefix, place)
            for place, text in texts.items()
            for part, prefix in _parts_and_prefixes(match[1], wanted[place[0]], text)
            if part == WEIGHTS
        ]
        shortest = min((len(prefix) for prefix, _ in matches), default=0)  # "a.user" before "user"
        for prefix, place in matches:
            if len(prefix) == shortest and place not in found:
                paths.setdefault(place, []).append((prefix, name))
    return found | {place: _foremost(pairs) for place, pairs in paths.items()}


def _foremost(pairs: list[tuple[str, str]]) -> list[str]:
    """Return the names without text before the table's, all names if each has some. pairs : (that text, name)"""
    return [name for prefix, name in pairs if not prefix] or [name for _, name in pairs]


def _flag(name: str, target: str) -> str:
    return f"--map {name}={target} (names=)"


def _no_target(name: str, target: str, wanted: Mapping[str, WantedTable]) -> UsageError:
    tables = f"tables: {listed(wanted)}; a frozen one has no slots"
    expected = f"a table, or TABLE/SLOT with a slot of its optimizer; {tables}"
    return UsageError(f"{_flag(name, target)}: expected {expected}")


def _place(target: str, wanted: Mapping[str, WantedTable]) -> tuple[str, str]:
    """Return the table and the part that TABLE or TABLE/SLOT names."""
    if target in wanted:
        return target, WEIGHTS
    table, _, part = target.rpartition("/")
    return table, part


def _names_table(name: str, table: WantedTable, there: Collection[str]) -> bool:
    """Return whether the source has tensors of a table that it calls so."""
    return any(_parts_and_prefixes(other, table, name) for other in there if other != name)


def _mapped(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, WantedTable], names: Mapping[str, str]
) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Return the tensors that ``names`` maps: name → (table, part); and the tables: table → name in the source."""
    mapped: dict[str, tuple[str, str]] = {}
    source_names: dict[str, str] = {}
    for name, target in names.items():
        table, part = _place(target, wanted)
        if table not in wanted or (part not in wanted[table].dims and (part != KEYS or not wanted[table].key_type)):
            raise _no_target(name, target, wanted)
        is_table = target in wanted and _names_table(name, wanted[target], tensors)
        if target in source_names or (table, part) in mapped.values():
            raise UsageError(f"{_flag(name, target)}: another name is mapped to {target}")
        if name in tensors:
            mapped[name] = table, part
        elif not is_table:
            problem = f"no tensor and no table of this name in the source; it has {listed(tensors)}"
            raise UsageError(f"{_flag(name, target)}: {problem}")
        if is_table:
            source_names[target] = name
    return mapped, source_names


def _parts_and_prefixes(name: str, table: WantedTable, source_name: str) -> list[tuple[str, str]]:
    """Return [(part, text before the table's name)] of a tensor's name, or [] if it names no part of the table.

    The part may be a slot of another optimizer. source_name : the name of the table in the source. The first place
    counts where the table's name is followed by a part: ``sum/sum`` is a slot of a table called sum.
    """
    for match in re.finditer(rf"(?:^|(?<=[./])){re.escape(source_name)}(?=[./]|$)", name):
        prefix, rest = name[: match.start()], name[match.end() + 1 :]
        if parts := _parts(rest, table, prefix):
            return [(part, prefix) for part in parts]
    return []


def _parts(rest: str, table: WantedTable, prefix: str) -> list[str]:
    """Return the parts of a table that a name may be. rest, prefix : the text after and before the table's name"""
    slot = re.sub(r"^weights?[./]", "", rest)
    if not rest or re.sub(r"[./]value$", "", rest) in _WEIGHTS:
        state = _OPTAX_STATE.search(prefix)
        if state is None:
            return [WEIGHTS]
        slots = OPTAX_NAMES.get(table.optimizer, {})
        return [part for part, other in slots.items() if other == state[1]] or [state[1]]
    if rest == KEYS and table.key_type is not None:
        return [KEYS]
    parts = [part for part in table.dims if part != WEIGHTS and slot in table.names(part)]
    return parts or ([slot] if slot in _SLOTS else [])  # of another optimizer


def _choice(pairs: list[tuple[str, str]], table: str, part: str, source: str) -> str:
    """Return the only name, or the only one without text before the table's. Raises InputError if several remain."""
    names = _foremost(pairs)
    if len(names) > 1:
        target = table if part == WEIGHTS else f"{table}/{part}"
        raise InputError(f"{listed(names)} are all named like {target}; choose one: --map NAME={target}", source=source)
    return names[0]


def _check(tensors: Mapping[str, Tensor], table: WantedTable, parts: Mapping[str, str], source: str) -> None:
    """Raise InputError for tensors whose type or shape does not fit."""
    num_rows = table.num_rows
    if table.key_type is not None:
        if KEYS not in parts:
            problem = (
                f"table '{table.name}' is dynamic, and there are no keys: '{table.name}/keys'; give their source, too"
            )
            raise InputError(problem, source=source)
        keys = tensors[parts[KEYS]]
        if len(keys.shape) != 1 or keys.dtype != table.key_type:
            problem = f"'{parts[KEYS]}': expected {table.key_type} of shape (rows,), the key_type of table "
            raise InputError(f"{problem}'{table.name}', got {keys.dtype} of shape {keys.shape}", source=source)
        (num_rows,) = keys.shape
    for part, name in parts.items():
        if part == KEYS:
            continue
        tensor, dim = tensors[name], table.dims[part]
        place = f"table '{table.name}', {part}: '{name}'"
        if tensor.dtype not in _FLOATS:
            advice = "NumPy saves bfloat16 so: convert it to float32" if tensor.dtype == "void16" else "convert it"
            problem = f"expected floats of type {', '.join(_FLOATS)}, got {tensor.dtype}; {advice} first"
            raise InputError(f"{place}: {problem}", source=source)
        if tensor.shape != (num_rows, dim) and (dim > 1 or tensor.shape != (num_rows,)):
            advice = parts_of_variable(tensors, table, part) or _advice(table, part, tensor.shape)
            problem = f"expected shape {(num_rows, dim)}, got {tensor.shape}; {advice}"
            raise InputError(f"{place}: {problem}", source=source)


def guessed_part(name: str) -> tuple[str, str]:
    """Return the table and the part that a tensor is named like, if its name says both; else ("", "")."""
    rest = re.sub(r"[./]value$", "", name)
    for word in sorted({*_WEIGHTS, *_SLOTS}, key=len, reverse=True):
        if (
            match := re.fullmatch(rf"((?:.*[./])?)(?!weights?[./])([^./]+)(?:[./]weights?)?[./]{re.escape(word)}", rest)
        ) is None:
            continue
        state = _OPTAX_STATE.search(match[1])
        if match[2].isdigit():  # states of torch.optim are numbered
            return "", ""
        return match[2], state[1] if state else WEIGHTS if word in _WEIGHTS else word
    return "", ""


def advice(contents: Contents, table: WantedTable) -> str:
    """Return what to do about a source without weights of a table."""
    for name, kind in contents.others.items():
        if any(part == WEIGHTS for part, _ in _parts_and_prefixes(name, table, table.name)):
            return f"'{name}' is {kind}"
    if pieces := parts_of_variable(contents.tensors, table, WEIGHTS):
        return pieces
    for name, tensor in contents.tensors.items():
        num_rows = tensor.shape[0] if tensor.shape and table.num_rows is None else table.num_rows
        is_slot = re.split(r"[./]", name)[-1] in _SLOTS
        if tensor.dtype in _FLOATS and tensor.shape == (num_rows, table.dims[WEIGHTS]) and not is_slot:
            return f"--map {shlex.quote(f'{name}={table.name}')} (names=) reads one of its shape"
    keeps = "--new-tables (new_tables=) keeps its initial rows"
    return f"--map NAME={table.name} (names=) names them, if no other SOURCE has them; {keeps}"


def parts_of_variable(tensors: Mapping[str, Tensor], table: WantedTable, part: str) -> str:
    """Return what to do with tensors that are the rows of a part of a table in pieces; "": there are none."""
    pieces: dict[str, list[tuple[int, str]]] = {}
    for name in tensors:
        if (match := re.fullmatch(r"(.*?)(\d+)(?:-?of-?\d+)?", name)) is not None:
            pieces.setdefault(match[1], []).append((int(match[2]), name))
    for numbered in pieces.values():
        names = [name for _, name in sorted(numbered)]
        shapes = [tensors[name].shape for name in names]
        fit = len(names) > 1 and all(shape[1:] == (table.dims[part],) for shape in shapes)
        if fit and sum(shape[0] for shape in shapes) == table.num_rows:
            return (
                f"{listed(names)} are the parts of one variable; join them in the order of the ids (with TensorFlow's "
                f"partition_strategy 'div': rows = numpy.concatenate(parts); with 'mod': rows[n::{len(names)}] = "
                "parts[n]), and import a folder with them as "
                f"{table.name if part == WEIGHTS else f'{table.name}/{part}'}.npy"
            )
    return ""


def _advice(table: WantedTable, part: str, shape: tuple[int, ...]) -> str:
    """Return what to do about a shape that does not fit."""
    is_moment = part in ("velocities", "exp_avg_sq")
    if part != WEIGHTS and shape == (table.num_rows,):
        has = "PartialRowWiseAdam has such second moments" if is_moment else "RowWiseAdagrad has such accumulators"
        return f"it has one number per row: {has}"
    if part != WEIGHTS and table.dims[part] == 1 and shape == (table.num_rows, table.dims[WEIGHTS]):
        has = "Adam has such second moments" if is_moment else "TorchAdagrad has such accumulators"
        return f"it has a number per weight: {has}"
    if len(shape) == 2 and part == WEIGHTS and table.num_rows is not None:
        return f"set vocabulary_size {shape[0]} and dimension {shape[1]}, or choose another tensor: --map NAME=TABLE"
    return "choose another tensor: --map NAME=TABLE/SLOT"
