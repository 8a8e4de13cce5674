"""Changes of the tables between a commit and the configuration that resumes it: tables come, go, and get other forms.

A change is applied to the description of the commit before anything is restored, so every way of restoring has it. It
happens only where commit and configuration differ, and the next commit records it: the same options, given again, find
no difference and change nothing.
"""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from penstock.base.errors import StateError, UsageError, UsageTypeError, listed
from penstock.checkpoint.manifests import VECTORS, num_pending
from penstock.checkpoint.store import Commit
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.specs import TableSpec
from penstock.model.options import TableChangeOptions
from penstock.rows.initial_vectors import file_of

log = logging.getLogger("penstock")

# In the contents of a commit: its changes so far, and of those the newest ones that stay.
TABLE_CHANGES, MOST_CHANGES = "table_changes", 64
# What must be as in the commit, and may only be changed by starting anew: the whole table, or its slots.
_OF_ROWS, _OF_SLOTS = ("dim", "storage_dtype", "dynamic"), ("trainable", "optimizer", "slots")
# The options that name tables of a commit.
_OF_COMMITS = ("drop_table", "rename", "reset_slots", "reset_table")


@dataclass(frozen=True, kw_only=True)
class TableChanges(TableChangeOptions):
    """The changes that a restoration permits. Raises UsageError for two of one table."""

    rename: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("drop_table", "reset_slots", "reset_table"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        if not isinstance(self.rename or {}, Mapping):
            raise UsageTypeError(f"rename: expected a mapping from old to new names, got {self.rename!r}")
        object.__setattr__(self, "rename", dict(self.rename or {}))
        counts = Counter([*self.drop_table, *self.rename, *self.rename.values(), *self.reset_slots, *self.reset_table])
        for name, count in counts.items():
            if count > 1:
                raise UsageError(
                    f"table '{name}': has {count} changes of tables; make one per start, each with a configuration "
                    "that has no other one"
                )

    def of(self, commit: Commit, config: EmbeddingConfig, place: str) -> ChangedTables:
        """Return a commit's tables as those of a configuration. place : the commit, for messages

        Raises StateError for a table that does not fit and that no option names, and for a change that cannot be.
        """
        return _Comparison(commit, config, place, self).result()

    def check_commit(self, place: object) -> None:
        """Raise UsageError for an option that changes tables of a commit: the checkpoint at ``place`` has none."""
        for name in _OF_COMMITS:
            if getattr(self, name):
                raise UsageError(
                    f"{name.replace('_', '-')}: {place} has no commit with tables to change; omit the option"
                )


@dataclass(frozen=True)
class TableChange:
    """A change of tables in the history of a checkpoint.

    number : from 1; step : the global step at which it happened
    frozen, trained : those whose ``trainable`` has changed
    lost_sums : table → ids whose gradients waited in the gate, and were dropped with its rows
    """

    number: int
    step: int
    new: Sequence[str] = ()
    dropped: Sequence[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    reset_slots: Sequence[str] = ()
    reset: Sequence[str] = ()
    frozen: Sequence[str] = ()
    trained: Sequence[str] = ()
    lost_sums: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        lost = {name: f" ({count} sums of the gate dropped)" for name, count in self.lost_sums.items()}
        changed = {*self.frozen, *self.trained}
        phrases = [
            *((name, f"'{name}' new") for name in self.new),
            *((name, f"'{name}' dropped") for name in self.dropped),
            *((name, f"'{name}' renamed to '{new}'") for name, new in self.renamed.items()),
            *((name, f"'{name}' frozen") for name in self.frozen),
            *((name, f"'{name}' trained, with new slots") for name in self.trained),
            *((name, f"'{name}' with new slots") for name in self.reset_slots if name not in changed),
            *((name, f"'{name}' started anew") for name in self.reset),
        ]
        text = ", ".join(phrase + lost.get(name, "") for name, phrase in phrases)
        return f"change {self.number} of the tables, at step {self.step}: {text}"

    def get_state(self) -> dict[str, Any]:
        """Return it as plain data, without what is empty."""
        return {name: value for name, value in asdict(self).items() if name == "step" or value}


def changes_in(contents: Mapping[str, Any]) -> list[TableChange]:
    """Return the changes of tables that a commit records, the oldest first."""
    names = [field.name for field in fields(TableChange)]
    return [
        TableChange(**{name: state[name] for name in names if name in state})
        for state in contents.get(TABLE_CHANGES, ())
    ]


def states_of(changes: Sequence[TableChange]) -> list[dict[str, Any]]:
    """Return what a commit records of changes, as plain data."""
    return [change.get_state() for change in changes[-MOST_CHANGES:]]


@dataclass(frozen=True)
class ChangedTables:
    """A commit as an engine with other tables restores it.

    contents : of the commit, as if it had been made with these tables
    names : the name of a table in the files → its name here; others are not loaded
    weights_only : tables whose slots are not loaded
    change : None: the tables are those of the commit
    adds_rows : whether a table has rows or keys that no reader of the commit has: it has grown, or has become dynamic
    """

    contents: Mapping[str, Any]
    names: Mapping[str, str]
    weights_only: frozenset[str] = frozenset()
    change: TableChange | None = None
    adds_rows: bool = False


def first_names(contents: Mapping[str, Any]) -> dict[str, str]:
    """Return the renamed tables of a commit, each with the name that it is drawn as."""
    return {table["name"]: table["drawn_as"] for table in contents["tables"] if "drawn_as" in table}


def described(spec: TableSpec) -> dict[str, Any]:
    """Return the entry of a table in a manifest."""
    return {
        "name": spec.name,
        "vocabulary_size": spec.vocabulary_size,
        "dim": spec.dim,
        **({} if spec.trainable else {"trainable": False}),
        "optimizer": type(spec.optimizer).__name__ if spec.trainable else "",
        "slots": [name for name, _ in spec.slots],
        "storage_dtype": spec.storage_dtype,
        **({} if spec.dynamic is None else {"dynamic": asdict(spec.dynamic)}),
        **({} if spec.drawn_as == spec.name else {"drawn_as": spec.drawn_as}),
    }


class _Difference(NamedTuple):
    """A table that no option lets differ. problem : with what to do; flag : that permits the difference"""

    table: str
    problem: str
    flag: str


class _Comparison:
    """The tables of a commit next to those of a configuration."""

    def __init__(self, commit: Commit, config: EmbeddingConfig, place: str, changes: TableChanges) -> None:
        self._contents, self._config, self._place, self._changes = commit.contents, config, place, changes
        self._saved = {table["name"]: table for table in commit.contents["tables"]}
        self._specs = {spec.name: described(spec) for spec in config.tables}
        self._past = changes_in(commit.contents)

    def result(self) -> ChangedTables:
        changes = self._changes
        dropped = [name for name in changes.drop_table if self._drops(name)]
        renamed = {old: new for old, new in changes.rename.items() if self._renames(old, new)}
        names = {name: renamed.get(name, name) for name in self._saved if name not in dropped}
        here = {new: self._entry(old, new) for old, new in names.items()}
        reset = [name for name in changes.reset_table if self._resets(name, here)]
        new_slots = [name for name in changes.reset_slots if self._resets_slots(name, here)]
        new = [name for name in self._specs if name not in here]
        for name in reset:
            here[name] = self._specs[name]
        frozen = [name for name in new_slots if "trainable" in self._specs[name]]
        trained = [name for name in new_slots if "trainable" in here[name] and name not in frozen]
        for name in new_slots:
            kept = {key: value for key, value in here[name].items() if key not in _OF_SLOTS}
            here[name] = {**kept, **{key: value for key, value in self._specs[name].items() if key in _OF_SLOTS}}
        self._check([*self._gone(here, new), *self._added(new, dropped), *self._other_forms(here)])
        adds_rows = any(self._adds_rows(name, entry) for name, entry in here.items())
        if not any((new, dropped, renamed, new_slots, reset)):
            return ChangedTables(self._contents, names, adds_rows=adds_rows)
        number = self._past[-1].number + 1 if self._past else 1
        step = int(self._contents["global_step"])
        change = TableChange(number, step, new, dropped, renamed, new_slots, reset, frozen, trained)
        entries = [here.get(name, self._specs[name]) for name in self._specs]
        loaded = {old: name for old, name in names.items() if name not in reset}
        return ChangedTables(self._with_tables(entries, loaded), loaded, frozenset(new_slots), change, adds_rows)

    def _with_tables(self, entries: list[dict[str, Any]], loaded: Mapping[str, str]) -> dict[str, Any]:
        programs = self._contents["programs"]
        contents = {
            **self._contents,
            "tables": entries,
            "programs": {name: programs[old] for old, name in loaded.items() if old in programs},
        }
        # Rates of other tags; the next frame or schedule has those of these.
        num_tags, last = self._config.num_tags, contents["pipeline"]["last"]
        if contents["learning_rates"] is not None and len(contents["learning_rates"]) != num_tags:
            contents["learning_rates"] = None
        if last is not None and last[2] is not None and len(last[2]) != num_tags:
            contents["pipeline"] = {**contents["pipeline"], "last": [*last[:2], None]}
        return contents

    # ---- what the options name

    def _drops(self, name: str) -> bool:
        action, flag = f"drop table '{name}'", flag_text("--drop-table", name)
        if name in self._specs:
            raise UsageError(f"{action}: the configuration has it; remove it there, or omit {flag}")
        if name in self._saved:
            return True
        self._check_done(action, flag, (change.dropped for change in self._past), name)
        return False

    def _renames(self, old: str, new: str) -> bool:
        action, flag = f"rename table '{old}' to '{new}'", flag_text("--rename", f"{old}={new}")
        if old in self._specs or new not in self._specs:
            has = f"still has '{old}'" if old in self._specs else f"has no '{new}'"
            raise UsageError(f"{action}: the configuration {has}; give it the new name there, or omit {flag}")
        if old in self._saved and new in self._saved:
            raise StateError(
                f"{self._place}: {action}: the checkpoint has both, and rows of one table never replace those of "
                f"another; rename or drop '{new}' in an earlier start"
            )
        if old in self._saved:
            return True
        self._check_done(action, flag, (change.renamed.items() for change in self._past), (old, new))
        return False

    def _resets(self, name: str, here: Mapping[str, Any]) -> bool:
        action, flag = f"start table '{name}' anew", flag_text("--reset-table", name)
        entry = self._known(action, flag, name, here)
        if entry is not None and (
            self._differing(name, entry) or self._shrinks(name, entry) or self._has_other_vectors(name)
        ):
            return True
        self._check_done(action, flag, (change.reset for change in self._past), name, entry)
        return False

    def _has_other_vectors(self, name: str) -> bool:
        """Return whether a table starts from other vectors than in the commit. Raises InputError: there is no file."""
        file = file_of(self._config.table(name))
        before = self._contents.get(VECTORS, {}).get(name)
        return (None if file is None else file.digest) != (None if before is None else str(before[1]))

    def _resets_slots(self, name: str, here: Mapping[str, Any]) -> bool:
        action, flag = f"start the slots of table '{name}' anew", flag_text("--reset-slots", name)
        entry = self._known(action, flag, name, here)
        if entry is not None and self._differing(name, entry, _OF_SLOTS):
            return True
        self._check_done(action, flag, (change.reset_slots for change in self._past), name, entry)
        return False

    def _known(self, action: str, flag: str, name: str, here: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the entry of a table in the commit; None: it has none."""
        if name not in self._specs:
            raise UsageError(f"{action}: the configuration has no such table; omit {flag}")
        entry: Mapping[str, Any] | None = here.get(name)
        return entry

    def _check_done(
        self, action: str, flag: str, past: Iterable[Iterable[Any]], item: Any, entry: object = None
    ) -> None:
        """Raise StateError unless an earlier change has made what nothing is left to do for."""
        if any(item in parts for parts in past):
            log.info("%s: %s; done before", self._place, action)
            return
        why = "the checkpoint has no such table" if entry is None else "it fits the configuration, and keeps its rows"
        raise StateError(f"{self._place}: {action}: {why}; omit {flag}")

    # ---- what is left

    def _entry(self, old: str, name: str) -> dict[str, Any]:
        """Return the entry of a table of the commit under its name here."""
        entry = {**self._saved[old], "name": name}
        drawn_as = entry.pop("drawn_as", old)
        return entry if drawn_as == name else {**entry, "drawn_as": drawn_as}

    def _check(self, differences: Sequence[_Difference]) -> None:
        """Raise StateError for the first difference; the message has the flags for the others."""
        if not differences:
            return
        (_, problem, _), *others = differences
        if others:
            problem += "; other tables differ too: " + listed(f"'{table}' ({flag})" for table, _, flag in others)
        raise StateError(f"{self._place}: {problem}")

    def _gone(self, here: Mapping[str, dict[str, Any]], new: Sequence[str]) -> Iterator[_Difference]:
        """Yield the tables that the configuration no longer has. new : those that only the configuration has"""
        for name, entry in here.items():
            if name in self._specs:
                continue
            drop, rename = flag_text("--drop-table", name), ""
            action = f"{drop} to remove it (drop_table=)"
            if new:
                alike = [each for each in new if not self._differing(each, entry, _OF_ROWS)]
                rename = flag_text("--rename", f"{name}={alike[0] if len(alike) == 1 else 'NEW'}")
                action = f"{rename} to keep its rows (rename=), or {action}"
            problem = (
                f"table '{name}' is in the checkpoint and not in the configuration; add it there, or give {action}"
            )
            yield _Difference(name, problem, f"{rename} or {drop}" if new else drop)

    def _added(self, new: Sequence[str], dropped: Sequence[str]) -> Iterator[_Difference]:
        """Yield the tables that only the configuration has."""
        for name in () if self._changes.new_tables else new:
            old = f", or {flag_text('--rename', f'OLD={name}')} in place of --drop-table OLD" if dropped else ""
            yield _Difference(
                name,
                f"table '{name}' is in the configuration and not in the checkpoint; give --new-tables to start it "
                f"with its initial rows (new_tables=){old}",
                "--new-tables",
            )

    def _other_forms(self, here: Mapping[str, dict[str, Any]]) -> Iterator[_Difference]:
        """Yield the tables that are to be loaded and do not fit."""
        for name, entry in here.items():
            if name in self._specs and (problem := self._form_problem(name, entry)) is not None:
                yield problem

    def _form_problem(self, name: str, old: dict[str, Any]) -> _Difference | None:
        new, flag = self._specs[name], flag_text("--reset-table", name)
        anew, advice = "start it with its initial rows (reset_table=)", "give the configuration that it was made with"
        differing = self._differing(name, old)
        if "dynamic" in old and "dynamic" not in new:
            there, here = "is dynamic", "not"
        elif "dynamic" in new and "dynamic" not in old and num_pending(self._contents):
            raise StateError(
                f"{self._place}: table '{name}' becomes dynamic, which frames in the gate prevent: --flush them first"
            )
        elif differing:
            key = differing[0]
            there = here = ""
            if key == "trainable":
                slots = f" with slots {listed(old['slots'])}" if old["slots"] else ""
                there, here = (f"is trained{slots}", "frozen") if "trainable" in new else ("is frozen", "trained")
            there = there or f"has {key} {setting_text(old.get(key), new.get(key))}"
            here = here or setting_text(new.get(key), old.get(key))
            if set(differing) <= set(_OF_SLOTS) and not self._shrinks(name, old):
                flag = flag_text("--reset-slots", name)
                anew = "keep its weights and start new slots (reset_slots=)"
                if "trainable" in new:
                    anew = "keep its weights and drop its slots (reset_slots=)"
        elif self._shrinks(name, old):
            there, here = f"has {old['vocabulary_size']} rows", f"only {new['vocabulary_size']}"
            advice = "a table may grow, not shrink; give as many"
        else:
            return None
        differs = f"table '{name}' {there} in the checkpoint and {here} in the configuration"
        return _Difference(name, f"{differs}; {advice}, or {flag} to {anew}", flag)

    def _differing(self, name: str, old: Mapping[str, Any], keys: Sequence[str] = (*_OF_ROWS, *_OF_SLOTS)) -> list[str]:
        """Return the properties that differ. A table may become dynamic: loading finds out how many keys there are."""
        new = self._specs[name]
        becomes = "dynamic" in new and "dynamic" not in old
        return [key for key in keys if new.get(key) != old.get(key) and not (key == "dynamic" and becomes)]

    def _adds_rows(self, name: str, old: Mapping[str, Any]) -> bool:
        new = self._specs[name]
        return "dynamic" not in old and ("dynamic" in new or bool(new["vocabulary_size"] > old["vocabulary_size"]))

    def _shrinks(self, name: str, old: Mapping[str, Any]) -> bool:
        new = self._specs[name]
        becomes = "dynamic" in new and "dynamic" not in old
        return bool(new["vocabulary_size"] < old["vocabulary_size"]) and not becomes


def _names(option: str, value: object) -> tuple[str, ...]:
    """Return the names of tables that an option has, once each. Raises UsageTypeError."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise UsageTypeError(f"{option}: expected the names of tables, got {value!r}")
    return tuple(dict.fromkeys(names))


def flag_text(flag: str, value: str) -> str:
    """Return a flag as a shell takes it."""
    return f"{flag}{'=' if value.startswith('-') else ' '}{shlex.quote(value)}"


def setting_text(value: Any, other: Any) -> str:
    """Return a property of a table for a message: of settings those that differ from the others."""
    if isinstance(value, dict):
        value = [
            f"{name} {setting}"
            for name, setting in value.items()
            if not isinstance(other, dict) or other.get(name) != setting
        ]
    return (", ".join(value) or "none") if isinstance(value, list) else str(value)
