"""Which rows these are: the version of tables, and the history of steps that decides which versions it contains.

A lineage is a history of steps, as a list of epochs. An epoch begins wherever steps may depart from an earlier history:
at the first start of a service, and at each restoration from a commit, which may not be the newest one. Steps of one
epoch are those of one engine, so lineage, epoch and step together identify the rows: they are the version. Pure values:
they are stored in commits and sent to readers.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.base.errors import DeltasGoneError, UsageError, short
from penstock.model.frames import Float32

# The first epoch of every lineage.
FIRST_EPOCH = "0"
# The newest epochs that are kept; readers of earlier ones fetch the tables again.
MOST_EPOCHS = 64
ANEW = "read the tables again, and continue from their step"
# The fields of a lineage in the positions of a commit.
LINEAGE_FIELDS = ("lineage", "epochs", "parent")
_FORM = re.compile(r"(?:([A-Za-z0-9_]{1,64})-([A-Za-z0-9_]{1,64})-)?(-?[0-9]{1,19})")


@dataclass(frozen=True, init=False, repr=False)
class Version:
    """Names the rows of all tables at one step: equal versions, equal rows (docs/when_something_goes_back.md).

    Parameters
    ----------
    text : str
        What ``str`` of a version returned: ``LINEAGE-EPOCH-STEP``, or ``STEP`` of an engine that is of no lineage.

    Attributes
    ----------
    lineage : str
        The history of steps, which a service begins or continues; "": none. Versions of two lineages are unrelated.
    epoch : str
        The part of it between two starts, in which steps follow each other; "": none.
    step : int
        The global step.

    Raises
    ------
    UsageError
        For any other text.

    Examples
    --------
    >>> import penstock as ps
    >>> first, second = ps.Version("5f0c2f6a7f0e4f0b-0-17"), ps.Version("5f0c2f6a7f0e4f0b-0-20")
    >>> second.follows(first), first.follows(second), second.step, str(second)
    (True, False, 20, '5f0c2f6a7f0e4f0b-0-20')
    """

    lineage: str
    epoch: str
    step: int

    def __init__(self, text: str) -> None:
        match = _FORM.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise UsageError(f"expected a version, such as 5f0c2f6a7f0e4f0b-0-17, got {short(repr(text))}")
        vars(self).update(lineage=match[1] or "", epoch=match[2] or "", step=int(match[3]))

    @classmethod
    def of(cls, lineage: str, epoch: str, step: int) -> Version:
        """Return the version of a step.

        Parameters
        ----------
        lineage, epoch : str
            Identifiers of at most 64 letters, digits and ``_``; "": none.
        step : int
            The global step.

        Returns
        -------
        Version
        """
        return cls(f"{lineage}-{epoch}-{step}" if lineage else str(step))

    def __str__(self) -> str:
        return f"{self.lineage}-{self.epoch}-{self.step}" if self.lineage else str(self.step)

    def __repr__(self) -> str:
        return f"Version('{self}')"

    def at(self, step: int) -> Version:
        """Return the version of another step of the same epoch.

        Parameters
        ----------
        step : int
            The step.

        Returns
        -------
        Version
        """
        return Version.of(self.lineage, self.epoch, step)

    def follows(self, other: Version) -> bool:
        """Return whether these rows came out of others by steps of one epoch.

        Parameters
        ----------
        other : Version
            Of the other rows.

        Returns
        -------
        bool
            False also for versions of two epochs: only their service knows whether one led to the other.
        """
        return other.at(self.step) == self and self.step > other.step


class LookupResult(dict[str, Float32]):
    """The rows of a lookup: table → float32, shape (n, dim), in the order of its ids.

    Parameters
    ----------
    rows : mapping of str to numpy.ndarray
        By table.

    Attributes
    ----------
    version : Version
        No row is older. With ``consistent=True``, and of an engine, every row is of this version.
    durable_step : int or None
        The step of the last commit: a crash may take back later changes. None: there is none.
    """

    def __init__(self, rows: Mapping[str, Float32], version: Version, durable_step: int | None) -> None:
        super().__init__(rows)
        self.version, self.durable_step = version, durable_step


class Epoch(NamedTuple):
    """first_step : the step at which it began; its own steps are those after it

    changes_tables : whether other tables, or more rows of one, begin with it: then it has its first step, too
    """

    id: str
    first_step: int
    changes_tables: bool = False

    @property
    def first_own_step(self) -> int:
        """The first step whose rows are those of this epoch."""
        return self.first_step + (not self.changes_tables)

    def get_state(self) -> list[Any]:
        """Return it as plain data."""
        return list(self) if self.changes_tables else [self.id, self.first_step]


class Parent(NamedTuple):
    """The commit that a branch began with. commit : the digest of its last file"""

    version: Version
    commit: str


@dataclass(frozen=True)
class Lineage:
    """id : identifies the history; epochs : in their order, the last one is the current one

    parent : where it departed from another history; None: it is no branch
    """

    id: str
    epochs: tuple[Epoch, ...] = (Epoch(FIRST_EPOCH, 0),)
    parent: Parent | None = None

    @classmethod
    def new(cls, step: int, parent: Parent | None = None) -> Lineage:
        """Return a new history, which begins at a step."""
        return cls(secrets.token_hex(8), (Epoch(FIRST_EPOCH, step),), parent)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Lineage | None:
        """Return what the positions of a commit contain; None: they contain no lineage."""
        if state["lineage"] is None:
            return None
        epochs = tuple(Epoch(name, int(step), *map(bool, rest)) for name, step, *rest in state["epochs"])
        if (parent := state.get("parent")) is None:
            return cls(state["lineage"], epochs)
        lineage, epoch, step, commit = parent
        return cls(state["lineage"], epochs, Parent(Version.of(lineage or "", epoch or "", step), commit))

    def get_state(self) -> dict[str, Any]:
        """Return it as plain data, for the positions of a commit."""
        state = {"lineage": self.id, "epochs": [epoch.get_state() for epoch in self.epochs]}
        if self.parent is None:
            return state
        version = self.parent.version
        return {**state, "parent": [version.lineage or None, version.epoch or None, version.step, self.parent.commit]}

    def started(self, step: int, changes_tables: bool = False) -> Lineage:
        """Return the lineage with one more epoch, from a step on. changes_tables : whether other tables begin with it

        Epochs that have not come to a step of their own are dropped: no reader has seen one.
        """
        begun = (epoch for epoch in self.epochs[1:] if epoch.first_own_step <= step)
        epochs = (self.epochs[0], *begun, Epoch(secrets.token_hex(8), step, changes_tables))
        return replace(self, epochs=epochs[-MOST_EPOCHS:])

    def at(self, step: int) -> Version:
        """Return the version of a step: one at which an epoch begins is of the epoch before, unless the tables change
        there."""
        earlier = [epoch.id for epoch in self.epochs if epoch.first_own_step <= step]
        return Version.of(self.id, earlier[-1] if earlier else self.epochs[0].id, step)

    def ahead(self, step: int) -> Version:
        """Return the version of a step as one of the current epoch, to which the steps to come belong."""
        return Version.of(self.id, self.epochs[-1].id, step)

    def check(self, version: Version) -> None:
        """Raise DeltasGoneError if the rows that a reader has need not be those of this history."""
        if version.lineage != self.id:
            raise DeltasGoneError(
                "this service's state is another one than that of the version asked for (it was restarted without its "
                f"checkpoint, or with another one); {ANEW}"
            )
        ids = [each.id for each in self.epochs]
        if version.epoch not in ids:
            raise DeltasGoneError(
                f"step {version.step} is of an epoch that is not in the history of this service (it was restored from "
                f"an older commit or from a copy, or has had more than {MOST_EPOCHS} epochs since); {ANEW}"
            )
        later = self.epochs[ids.index(version.epoch) + 1 :]
        for change in (each for each in later if each.changes_tables):
            raise DeltasGoneError(f"the tables of this service have changed at step {change.first_step}; {ANEW}")
        if later and version.step > later[0].first_step:
            raise DeltasGoneError(
                f"this service was restored from step {later[0].first_step} and has other steps since then than "
                f"those up to step {version.step} of an earlier epoch; {ANEW}"
            )
