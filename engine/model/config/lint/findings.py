"""The findings of lint: Finding, Subject, which creates them, and RULES with every code.

The checks are in proto_rules.py and settings_rules.py (loading refuses), runnable.py (running refuses), __init__.py,
optimizer_rules.py and number_rules.py (suspicious). docs/lint.md documents the codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import Message

from penstock.base.errors import MOST_LISTED, close_names
from penstock.model.config.proto_views import TableMessage

# Codes are never reused. PS0xx: loading refuses; PS1xx: about the whole configuration; PS2xx: about one table's
# optimization parameters.
RULES: dict[str, tuple[str, str]] = {
    "PS001": ("error", "no tables"),
    "PS002": ("error", "a table without a name"),
    "PS003": ("error", "two tables of one name"),
    "PS004": ("error", "a vocabulary_size below 1"),
    "PS005": ("error", "a dimension below 1"),
    "PS006": ("error", "a negative batch size or number of features"),
    "PS007": ("error", "a table without an optimizer, or with two"),
    "PS008": ("error", "a table without a learning rate"),
    "PS009": ("error", "a number that is not finite"),
    "PS010": ("error", "dynamic tags that are not 0, 1, 2, …"),
    "PS011": ("error", "a value that its enum does not have"),
    "PS012": ("error", "features both listed and counted"),
    "PS013": ("error", "a feature of a table that is not there"),
    "PS014": ("error", "an input_shape that is empty or not positive"),
    "PS015": ("error", "settings of a table or feature that is not there"),
    "PS016": ("error", "settings given twice"),
    "PS017": ("error", "an initializer that cannot be drawn from"),
    "PS018": ("error", "slot settings that do not fit the optimizer"),
    "PS019": ("error", "feature settings out of range"),
    "PS020": ("error", "gate settings out of range"),
    "PS021": ("error", "dynamic settings out of range or contradictory"),
    "PS022": ("error", "placement settings out of range or contradictory"),
    "PS023": ("error", "a name that is too long"),
    "PS024": ("error", "a column for a role that does not exist, given twice, or without a name"),
    "PS101": ("warning", "mode is UNSPECIFIED"),
    "PS102": ("info", "mode is INFERENCE"),
    "PS103": ("warning", "a table that no feature uses"),
    "PS104": ("warning", "features neither listed nor counted for every table"),
    "PS105": ("error", "a storage dtype this version cannot run"),
    "PS106": ("warning", "fewer rows than hosts"),
    "PS107": ("warning", "pipelining outside of training"),
    "PS201": ("error", "an optimizer this version cannot run"),
    "PS202": ("warning", "weight clip limits are reversed"),
    "PS203": ("warning", "gradient clip limits are reversed"),
    "PS204": ("warning", "weight decay that does not shrink weights"),
    "PS205": ("warning", "decay times learning rate, without a decay factor"),
    "PS206": ("warning", "gradient clipping without gradient accumulation"),
    "PS207": ("warning", "a constant learning rate of 0 or below"),
    "PS208": ("error", "updates of untouched rows without gradient accumulation"),
    "PS209": ("warning", "an accumulator that starts at zero"),
    "PS210": ("warning", "low-dimensional packing that cannot take effect"),
    "PS211": ("warning", "a number that float32 changes in meaning"),
    "PS212": ("warning", "a hyper-parameter outside its range"),
    "PS213": ("error", "simulated quantization without a usable range"),
    "PS214": ("error", "a hyper-parameter with which no update can be computed"),
    "PS215": ("warning", "weight decay without gradient accumulation"),
    "PS216": ("info", "an update whose formula is not public in full"),
    "PS217": ("warning", "a step counter that does not count steps"),
    "PS218": ("error", "a dynamic table that this version cannot run"),
    "PS219": ("error", "a cached table whose optimizer updates untouched rows"),
}


MAX_NAME_BYTES = 1024  # of UTF-8: names are repeated in messages, frames, deltas and files


@dataclass(frozen=True)
class Finding:
    """One finding of a lint rule.

    Attributes
    ----------
    code : str
        The rule, such as "PS212" (docs/lint.md).
    severity : {"error", "warning", "info"}
        "error": loading or running refuses it; "warning": probably a mistake.
    where : str
        The field, as a path from the TPUEmbeddingConfiguration (``table[…]``, ``feature[…]``, ``gate``: from the
        EngineConfig).
    message : str
        The setting and its effect.
    fix : str
        How to correct it.
    line : int or None
        In the text file that was linted, from 1; None for binary files, messages and fields not in the text.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, name="user", optimizer=ps.Momentum(0.1, momentum=1.5))
    >>> (finding,) = ps.EmbeddingConfig.from_tables([table]).lint()
    >>> finding.code, finding.severity
    ('PS212', 'warning')
    >>> print(finding)
    table 'user': momentum.momentum is 1.5; it should be at least 0 and below 1
    """

    code: str
    severity: str
    where: str
    message: str
    fix: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.message}; {self.fix}"


class Subject(NamedTuple):
    """A part of the configuration that rules are about. path : of its message; name : in messages; both may be empty"""

    path: str = ""
    name: str = ""

    def finding(self, code: str, field: str, problem: str, fix: str) -> Finding:
        """Return a finding about a field, a path below ``path``; about the subject itself if ``field`` is empty."""
        path = ".".join(filter(None, (self.path, field)))
        message = ": ".join(filter(None, (self.name, problem)))
        return Finding(code, RULES[code][0], path, message, fix)

    def below(self, code: str, message: Message, field: str, least: int, fix: str) -> Iterator[Finding]:
        """Yield a finding if a number is below ``least``."""
        number = getattr(message, field)
        if number < least:
            yield self.finding(code, field, f"{field} is {number}", fix)

    def unknown(self, message: Message, field: str, fix: str) -> Iterator[Finding]:
        """Yield a finding if an enum does not have the field's value."""
        value, enum = getattr(message, field), message.DESCRIPTOR.fields_by_name[field].enum_type
        if enum is not None and value not in enum.values_by_number:
            yield self.finding("PS011", field, f"{field} is {value}", fix)


def subject_of_parameters(table: TableMessage) -> Subject:
    """Return the optimization parameters of a table as a subject."""
    return Subject(f"table_descriptor[{table.index}].optimization_parameters", f"table '{table.name}'")


def near(name: str, candidates: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` if ``name`` resembles one of ``candidates``, else a list of them."""
    names = sorted(set(candidates))
    close = close_names(name, names, 2)
    if close:
        return "did you mean " + " or ".join(f"'{n}'" for n in close) + "?"
    shown = ", ".join(f"'{n}'" for n in names[:8]) + (", …" if len(names) > 8 else "")
    return f"there is {shown}" if names else "there is none"


class Nearest:
    """``near`` for several names and the same candidates.

    Only the first names are compared with all candidates, so that n wrong names among n are not n² comparisons.
    """

    def __init__(self, candidates: Iterable[str]) -> None:
        self._candidates, self._left = sorted(set(candidates)), MOST_LISTED

    def to(self, name: str) -> str:
        """Return ``near``, or advice without a name."""
        self._left -= 1
        return near(name, self._candidates) if self._left >= 0 else "use a name that the configuration lists"
