"""What a manifest must be: its digest, and the form of every field.

A digest shows that a commit arrived as it was written, not who wrote it. So whatever a reader uses has its type before
anything is done with it, a data file has a name of penstock's, which lies in the folder, and errors in reading the rest
are those of the commit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from penstock.base.errors import PenstockError, StateError

VECTORS = "vectors"  # table → path and digest of the file that it starts from
NORMS = "norms"  # of the last frames of each contributor
CLOCK_OFFSET = "clock_offset"
# Of rounds, once the gate has dropped its frames.
NO_TURNS: dict[str, Any] = {"taken": 0, "early": 0, "next": [], "rates": []}


def new_digest(data: bytes = b"") -> hashlib.blake2b:
    """Return a new digest of a commit's file or manifest. data : with which it begins"""
    return hashlib.blake2b(data, digest_size=32)


def digest_of(data: bytes) -> str:
    return new_digest(data).hexdigest()


# ---- the form

# The key of the format's number, and the one of versions that were never released.
KEY, FORMAT, UNRELEASED_KEY = "penstock.commit", 1, "penstock.checkpoint"
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
    "storage_dtype": str,
    "dynamic?": dict,
    "trainable?": bool,
    "drawn_as?": str,
}
_CHANGE = {
    "number": int,
    "step": int,
    **{name: [str] for name in ("new?", "dropped?", "reset_slots?", "reset?", "frozen?", "trained?")},
    "renamed?": {str: str},
    "lost_sums?": {str: int},
}
_COUNTERS = {
    **dict.fromkeys(["rows", "frames", "stale", "steps", "held_bytes", "truncated", "stale_rows"], int),
    "rolled_back": int,
    "not_finite": int,
    "first_not_finite": str,
    "dropped": {str: int},
    **dict.fromkeys(["late?", "clipped_steps?", "clipped_rows?"], int),
    "limited?": {str: int},
}
_MANIFEST = {
    KEY: int,
    "number": int,
    "files": [{"name": str, "num_bytes": int, "digest": str, "parent": (str, None)}],
    "global_step": int,
    "changed_step": int,
    CLOCK_OFFSET: int,
    "tables": [_TABLE],
    "table_changes?": [_CHANGE],
    "programs": {str: {"variant": str}},
    "num_required": int,
    "max_staleness?": int,
    "rounds?": {"ahead": int},
    f"{VECTORS}?": {str: [str]},
    "turns?": {"taken": int, "early": int, "next": [list], "rates": [list], "absent": {str: int}},
    f"{NORMS}?": [list],
    "reduction": str,
    "seed": int,
    "learning_rates": (list, None),
    "positions": {
        "sources": [list],
        "producers": {str: int},
        "tallies": {str: list},
        "creations": {str: str},
        "stale_rows": int,
        "rows": int,
        "unchecked": [int],
    },
    "counters": _COUNTERS,
    "gate": {"global_step": int, "num_accumulated": int},
    "pipeline": dict,
    "config": str,
    "python": [str],
    "tag?": {"name": str, "note": str, "tagged_s": int},
}
_WORDS = {bool: "true or false", int: "an integer of 64 bits", str: "a text", dict: "an object", list: "a list"}


def check_manifest(fields: Any) -> None:
    """Raise ValueError, which names the field, if a parsed manifest does not have the form of one."""
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
    _check_bases([file["name"] for file in fields["files"]])
    if fields["reduction"] not in ("mean", "sum"):
        raise ValueError(f"reduction is {_shown(fields['reduction'])}")
    for field in ("files", "tables"):
        names = [entry["name"] for entry in fields[field]]
        if len({*names}) < len(names):
            raise ValueError(f"{field} has two entries of one name")
    for number, table in enumerate(fields["tables"]):
        if min(table["vocabulary_size"], table["dim"]) < 1:
            raise ValueError(f"tables[{number}] has {table['vocabulary_size']} rows of dim {table['dim']}")


def _check_bases(names: list[str]) -> None:
    """Raise ValueError unless there are files, and those of each part of the rows begin with a base."""
    kinds: dict[str, str] = {}
    for name in names:
        part, _, kind = name.partition(".")
        rank, is_share, count = part.lstrip("0123456789").removeprefix("-").partition("of")
        if is_share and int(rank) >= int(count):
            raise ValueError(f"files has share {_shown(int(rank))} of {_shown(int(count))}")
        kinds.setdefault(part.lstrip("0123456789"), kind.rpartition(".")[2])
    counts = {part.partition("of")[2] for part in kinds}
    if {*kinds.values()} != {"base"} or len(counts) > 1:
        raise ValueError("files has no base of all rows, or of each share")


def _check(value: Any, form: Any, place: str) -> None:
    """Raise ValueError if a value does not have a form."""
    if isinstance(form, tuple):
        if value is not None:
            _check(value, form[0], place)
        return
    kind: Any = form if isinstance(form, type) else type(form)
    fits: bool = type(value) is kind and (kind is not int or -(1 << 63) <= value < 1 << 64)
    if not fits:
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


def num_pending(contents: Mapping[str, Any]) -> int:
    """Return how many frames the gate of a commit holds."""
    turns = contents.get("turns")
    return int(contents["gate"]["num_accumulated"] if turns is None else turns["taken"] + turns["early"])


@contextmanager
def trusting(place: str) -> Iterator[None]:
    """Convert errors in reading the contents of a commit to StateError. place : the commit, for messages

    The digests match, so the commit was written like this: none of its contents can be trusted.
    """
    try:
        yield
    except PenstockError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise StateError(f"{place}: its contents do not add up ({type(error).__name__}: {error})") from error
