"""The findings of lint: Finding, Subject, which creates them, and RULES with every code.

The checks are in proto_rules.py and settings_rules.py (loading refuses), runnable.py (running refuses), __init__.py,
optimizer_rules.py and number_rules.py (suspicious). docs/hooks.py makes the site's page of the codes.
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
    "PS025": ("error", "a number of penstock's own optimizers outside its range"),
    "PS026": ("error", "a setting of frozen tables where the table is trained, or out of range"),
    "PS027": ("error", "a norm of gradients that is missing or out of range"),
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
    "PS220": ("error", "initial vectors that the optimizer's first update replaces"),
}
# What to do about each, in Markdown for the site.
ADVICE: dict[str, str] = {
    "PS001": "Add a `table_descriptor`.",
    "PS002": "Give the table a name; sources, slots and files refer to it.",
    "PS003": "Give every table a unique name.",
    "PS004": "Set `vocabulary_size` to the number of rows.",
    "PS005": "Set `dimension` to the width of a row.",
    "PS006": "Omit it, or set it to 0 or more.",
    "PS007": (
        "Set exactly one member of `optimization_parameters`, or one of penstock's optimizers in the table's settings."
    ),
    "PS008": "Set `learning_rate { constant: … }` or `{ dynamic { tag: … } }`. TensorFlow would read 0.",
    "PS009": "Write a number that float32 can hold; omit a clip bound to leave that side open.",
    "PS010": (
        "Number the tags of all tables (step counters included) from 0 without a gap; the rates of a step are in "
        "that order."
    ),
    "PS011": "Use one of the names of the enum.",
    "PS012": (
        "List features in `feature_descriptor`, or count them with `batch_size_per_tensor_core` and "
        "`num_features`, not both."
    ),
    "PS013": "`table_id` is the index of a `table_descriptor`, from 0.",
    "PS014": "Give every feature the shape of its input without the axis that is combined, e.g. the batch size.",
    "PS015": "Correct the name (or `feature_id`) in the EngineConfig.",
    "PS016": "Keep the settings of one table, feature or slot in one place.",
    "PS017": "Numbers must be finite, `stddev` at least 0, `min` at most `max`; `initial` needs `from`.",
    "PS018": (
        "Use the slot names of [optimizers.md](../optimizers.md), finite values, and accumulators above 0 where "
        "the update divides by them."
    ),
    "PS019": "`combiner` is `sum`, `mean` or `sqrtn`; `max_sequence_length` is at least 0.",
    "PS020": "`num_required` is at least 1.",
    "PS021": "The message names the setting; [dynamic.md](../dynamic.md) lists what each accepts.",
    "PS022": (
        "CACHED needs `device_bytes` of at least 1, and may have `look_ahead` of at least 0; other placements "
        "have neither."
    ),
    "PS023": "Names of tables, features, slots and combiners have at most 1,024 bytes of UTF-8.",
    "PS024": "The roles are `id`, `gradient`, `table`, `step`, `contributor`, `learning_rates` and `time`.",
    "PS025": "Keep to the range, as the classes do; omit the number for the default.",
    "PS026": "`on_gradient` and `until_step` need `trainable: false`, and `until_step` is at least 1.",
    "PS027": "Norms of `clip` are finite and above 0; `contributor_norm` of `limit` is at least 1.",
    "PS101": "Set `mode: TRAINING`; TensorFlow refuses to run UNSPECIFIED.",
    "PS102": "Set `mode: TRAINING` if the tables are to change.",
    "PS103": "Add a feature that uses the table, or remove it; TensorFlow refuses it, row streams accept it.",
    "PS104": "List the features, or set both `batch_size_per_tensor_core` and every `num_features`, or neither.",
    "PS105": "Remove `storage_dtype`, or set FLOAT32 or BFLOAT16.",
    "PS106": "Set `vocabulary_size` to `num_hosts`, as TensorFlow's own classes do for small tables.",
    "PS107": "Set `mode: TRAINING`, or remove `pipeline_execution_with_tensor_core`.",
    "PS201": (
        "Use another optimizer; a program is given in Python, with `UserDefinedProgram`. Loading and saving keep "
        "this one."
    ),
    "PS202": "Swap the limits: every touched weight becomes the upper one.",
    "PS203": "Swap the limits: every gradient becomes the upper one.",
    "PS204": "Use a small factor above 0: a touched weight becomes `w - factor*w`.",
    "PS205": "Set `weight_decay_factor`, or remove the flag.",
    "PS206": (
        "Turn accumulation on, or remove the limits: without it, each part of a step is clipped separately. "
        "TensorFlow's classes refuse it."
    ),
    "PS207": "Set a rate above 0, or a dynamic tag. FTRL and OnlineYogi divide by it.",
    "PS208": "Turn accumulation on, or make the optimizer lazy.",
    "PS209": "Start FTRL's accumulators above 0. `allow_zero_accumulator` has no effect.",
    "PS210": (
        "Remove `low_dimensional_packing_status`: only dimensions 1, 2 and 4 are packed, and only where a "
        "gradient of 0 changes nothing. Results are the same with and without."
    ),
    "PS211": (
        "Write a number that float32 can hold; keep averages (`beta2`, `rho`) further from 1. Reported for text "
        "files and Python classes, where the number as written is known."
    ),
    "PS212": "Keep to the range; TensorFlow's classes refuse values outside it, its proto does not.",
    "PS213": "Set `num_buckets` to at least 2, and both limits, lower below upper.",
    "PS214": "Set the field: 0, its default in a proto, has no meaning there.",
    "PS215": "Turn accumulation on: without it, weights decay once for every part of a step.",
    "PS216": (
        "Compare with a TensorFlow run before you rely on equal results; [optimizers.md](../optimizers.md) lists "
        "the evidence."
    ),
    "PS217": "Give the step number as the (dynamic) learning rate.",
    "PS218": "Use an optimizer that leaves untouched rows alone, and a `vocabulary_size` below 2^31.",
    "PS219": "Place the table on DEVICE or HOST: each step updates every row, and only some are on the devices.",
    "PS220": "Use another optimizer, or load the vectors with `--init`, which computes that slot too.",
}

MAX_NAME_BYTES = 1024  # of UTF-8: names are repeated in messages, frames, deltas and files


@dataclass(frozen=True)
class Finding:
    """One finding of a lint rule.

    Attributes
    ----------
    code : str
        The rule, such as "PS212".
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


def subject_of_optimizer(table: TableMessage) -> Subject:
    """Return the message of a table that has the message of its optimizer, as a subject."""
    if table.settings.WhichOneof("optimizer") is None:
        return subject_of_parameters(table)
    return Subject(f"table[{table.settings_index}]", f"table '{table.name}'")


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
