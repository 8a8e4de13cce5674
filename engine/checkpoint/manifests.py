"""What a manifest must be: the digests of a commit, per version of the format, and the form of every field.

A digest shows that a commit arrived as it was written, not who wrote it. So whatever a reader uses has its type before
anything is done with it, a data file has a name of penstock's, which lies in the folder, and errors in reading the rest
are those of the commit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np

from penstock.errors import PenstockError, StateError
from penstock.filesystem.state_files import parsed_json

# Format version of new commits.
VERSION = 3
_BLOCK_BYTES, _LEAVES = 128, 4
_TREE: dict[str, Any] = {"fanout": _LEAVES, "depth": 2, "inner_size": 64}


class Digest(Protocol):
    """The part of hashlib's interface that commits use."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class Blake2bp:
    """BLAKE2bp, truncated to 32 bytes: leaf n % 4 hashes block n of 128 bytes, and the root hashes the leaves."""

    def __init__(self) -> None:
        self._leaves = [
            hashlib.blake2b(node_offset=leaf, last_node=leaf == _LEAVES - 1, **_TREE) for leaf in range(_LEAVES)
        ]
        self._rest = b""

    def update(self, data: bytes | memoryview, /) -> None:
        data = self._rest + bytes(data)
        whole = len(data) - len(data) % (_BLOCK_BYTES * _LEAVES)
        stripes = np.frombuffer(data, np.uint8, whole).reshape(-1, _LEAVES, _BLOCK_BYTES)
        for number, leaf in enumerate(self._leaves):
            leaf.update(np.ascontiguousarray(stripes[:, number]).data)
        self._rest = data[whole:]

    def hexdigest(self) -> str:
        root = hashlib.blake2b(node_depth=1, last_node=True, **_TREE)
        for number, leaf in enumerate(self._leaves):
            complete = leaf.copy()
            complete.update(self._rest[number * _BLOCK_BYTES : (number + 1) * _BLOCK_BYTES])
            root.update(complete.digest())
        return root.hexdigest()[:64]


# Format version → digest. Version 2 is read, never written.
DIGESTS: Mapping[int, Callable[[], Digest]] = {VERSION: partial(hashlib.blake2b, digest_size=32), 2: Blake2bp}


def digest_of(data: bytes, version: int = VERSION) -> str:
    digest = DIGESTS[version]()
    digest.update(data)
    return digest.hexdigest()


# ---- the form

KEY = "penstock.checkpoint"
PART = r"[0-9]{8,}(-[0-9]+of[0-9]+(\.[0-9a-f]+)?)?\.(commit|base|delta)"
_DATA_FILE = re.compile(PART.replace("commit|", ""))
_DIGEST = re.compile(r"[0-9a-f]{64}")

# A type; None after it: or nothing; [form of every item]; {name: form}, where a name with "?" may be missing, or
# {str: form of every value}. Other fields may have any value.
_TABLE = {
    "name": str,
    "vocabulary_size": int,
    "dim": int,
    "optimizer": str,
    "slots": [str],
    "storage_dtype?": str,
    "dynamic?": dict,
}
_COUNTERS = {
    **dict.fromkeys(["rows?", "frames?", "stale?", "steps?", "held_bytes?", "truncated?", "stale_rows?"], int),
    "dropped": {str: int},
}
_MANIFEST = {
    KEY: int,
    "number": int,
    "files": [{"name": str, "num_bytes": int, "digest": str, "parent": (str, None)}],
    "global_step": int,
    "changed_step?": int,
    "tables": [_TABLE],
    "programs?": {str: {"variant": str}},
    "num_required": int,
    "reduction": str,
    "seed": int,
    "learning_rates": (list, None),
    "positions": {"sources": [list], "producers?": {str: int}, "tallies?": {str: list}},
    "counters": _COUNTERS,
    "gate": {"global_step": int, "num_accumulated": int},
    "pipeline": dict,
    "config": str,
    "python": [str],
}
_WORDS = {int: "an integer of 64 bits", str: "a text", dict: "an object", list: "a list"}


def read_manifest(text: bytes) -> dict[str, Any]:
    """Parse a manifest without its digest. Raises ValueError, which names the field."""
    fields = parsed_json(text)
    _check(fields, _MANIFEST, "manifest")
    for number, file in enumerate(fields["files"]):
        place = f"files[{number}]"
        if not _DATA_FILE.fullmatch(file["name"]):
            raise ValueError(f"{place}.name is {_shown(file['name'])}, not the name of a base or delta")
        if file["num_bytes"] < 0:
            raise ValueError(f"{place}.num_bytes is {file['num_bytes']}")
        for field in ("digest", "parent"):
            if file[field] is not None and not _DIGEST.fullmatch(file[field]):
                raise ValueError(f"{place}.{field} is {_shown(file[field])}, not a digest")
    if fields["reduction"] not in ("mean", "sum"):
        raise ValueError(f"reduction is {_shown(fields['reduction'])}")
    for field in ("files", "tables"):
        names = [entry["name"] for entry in fields[field]]
        if len({*names}) < len(names):
            raise ValueError(f"{field} has two entries of one name")
    for number, table in enumerate(fields["tables"]):
        if min(table["vocabulary_size"], table["dim"]) < 1:
            raise ValueError(f"tables[{number}] has {table['vocabulary_size']} rows of dim {table['dim']}")
    return dict(fields)


def _check(value: Any, form: Any, place: str) -> None:
    """Raise ValueError if a value does not have a form."""
    if isinstance(form, tuple):
        if value is not None:
            _check(value, form[0], place)
        return
    kind: Any = form if isinstance(form, type) else type(form)
    is_long = kind is int and type(value) is int and not -(1 << 63) <= value < 1 << 64
    if type(value) is not kind or is_long:
        raise ValueError(f"{place} is {_shown(value)}, expected {_WORDS[kind]}")
    if isinstance(form, list):
        for number, item in enumerate(value):
            _check(item, form[0], f"{place}[{number}]")
    elif isinstance(form, Mapping):
        _check_fields(value, form, place)


def _check_fields(value: dict[str, Any], form: Mapping[Any, Any], place: str) -> None:
    if str in form:
        for name, item in value.items():
            _check(item, form[str], f"{place}[{_shown(name)}]")
        return
    for name, of_field in form.items():
        field = name.rstrip("?")
        if field in value:
            _check(value[field], of_field, f"{place}.{field}")
        elif field == name:
            raise ValueError(f"{place}.{field} is missing")


def _shown(value: Any) -> str:
    """Return a value for a message, shortened."""
    if isinstance(value, list | dict):
        return _WORDS[type(value)]
    if isinstance(value, int) and abs(value) >> 64:  # Python refuses to print very long ones
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


@contextmanager
def trusting(where: str) -> Iterator[None]:
    """Convert errors in reading the contents of a commit to StateError. where : the commit, for messages

    The digests match, so the commit was written like this: none of its contents can be trusted.
    """
    try:
        yield
    except PenstockError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise StateError(f"{where}: its contents do not add up ({type(error).__name__}: {error})") from error
