"""The numbers of a configuration as written, before rounding to float32, by their path in the message.

``numbers_of`` takes them from Python objects; ``scan`` takes them from a text that has already been parsed, with the
line number of every field. Only lint uses them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from penstock.model.updates import Optimizer

INNER = "tpu_embedding_configuration"  # paths start below it


def numbers_of(path: str, optimizer: Optimizer) -> dict[str, float]:
    """Return path -> number for every constant number of ``optimizer``, whose message is at ``path``."""
    named: dict[str, Any] = {
        "learning_rate.constant": optimizer.learning_rate,
        "weight_decay_factor": optimizer.weight_decay_factor,
        "clipping_limits.lower.value": optimizer.clip_weight_min,
        "clipping_limits.upper.value": optimizer.clip_weight_max,
        "gradient_clipping_limits.lower.value": optimizer.clip_gradient_min,
        "gradient_clipping_limits.upper.value": optimizer.clip_gradient_max,
    }
    named |= {f"{optimizer.parameters_field}.{name}": value for name, value in optimizer.proto_values().items()}
    return {
        f"{path}.{name}": float(value)
        for name, value in named.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


@dataclass
class Scan:
    """The fields of a text: path -> line number, and path -> number as written."""

    lines: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def line_of(self, path: str) -> int | None:
        """Return the line of ``path``, or of the field that contains it; None if the text has neither."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path.rpartition(".")[0]
        return None


_TOKEN = re.compile(
    r"""(?P<skip>[\s,;]+|\#[^\n]*)|(?P<text>"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+')|(?P<word>[\w.+-]+)|."""
)


def scan(text: str, kind: type[Message]) -> Scan:
    """Scan a text that parses as a message of ``kind``; for another text, return the fields before the error."""
    fields = Scan()
    _Scanner(list(_tokens(text)), fields).message(kind.DESCRIPTOR, "")
    return fields


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    line = 1
    for match in _TOKEN.finditer(text):
        if match.lastgroup != "skip":
            yield match[0], line
        line += match[0].count("\n")


class _Scanner:
    """A walk over the tokens of a text, along the fields of its message."""

    def __init__(self, tokens: list[tuple[str, int]], fields: Scan) -> None:
        self.tokens, self.fields, self.index = tokens, fields, 0

    def peek(self) -> str:
        return self.tokens[self.index][0] if self.index < len(self.tokens) else ""

    def take(self) -> tuple[str, int]:
        self.index += 1
        return self.tokens[self.index - 1] if self.index <= len(self.tokens) else ("", 0)

    def message(self, kind: Any, prefix: str) -> None:
        """Scan the fields up to the end of a message; ``kind`` is None inside an unknown field."""
        counts: dict[str, int] = {}
        while self.peek() not in ("", "}", ">"):
            name, line = self.take()
            descriptor = kind.fields_by_name.get(name) if kind is not None else None
            inner = descriptor.message_type if descriptor is not None else None
            if self.peek() == ":":
                self.take()
            in_list = self.peek() == "["
            if in_list:
                self.take()
            while self.peek() not in ("", "]") if in_list else True:
                path = prefix + name
                if descriptor is not None and descriptor.is_repeated:
                    path += f"[{counts.get(name, 0)}]"
                    counts[name] = counts.get(name, 0) + 1
                    self.fields.lines.setdefault(prefix + name, line)
                self.value(inner, path, line)
                if not in_list:
                    break
            if in_list:
                self.take()
        self.take()

    def value(self, kind: Any, path: str, line: int) -> None:
        """Scan a message or a scalar, whose field is on ``line``."""
        self.fields.lines[path] = line
        if self.peek() in ("{", "<"):
            self.take()
            self.message(kind, "" if path == INNER else path + ".")
            return
        word, _ = self.take()
        while self.peek()[:1] in ('"', "'"):  # adjacent strings are one
            self.take()
        number = _number(word)
        if number is not None:
            self.fields.numbers[path] = number


def _number(word: str) -> float | None:
    try:
        return float(word.rstrip("fF")) if word[:1] in "+-.0123456789" else None
    except ValueError:
        return None
