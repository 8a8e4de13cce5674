"""The lineage of a state: the history of steps that it has, as a list of epochs, and whether a reader belongs to it.

An epoch begins wherever steps may depart from an earlier history: at the first start of a service, and at each
restoration from a commit, which may not be the newest one. Steps of one epoch are those of one engine, so the lineage,
the epoch and the step together identify the rows. Pure values: they are stored in commits and sent to readers.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

from penstock.base.errors import DeltasGoneError

# The first epoch of every lineage, and that of readers that name none.
FIRST_EPOCH = "0"
# The newest epochs that are kept; readers of earlier ones fetch the tables again.
MOST_EPOCHS = 64
ANEW = "read the tables again, and continue from their step"
# The fields of a lineage in the positions of a commit.
LINEAGE_FIELDS = ("lineage", "epochs", "parent")
_NO_EPOCH = "; give epoch= of that table or delta too (without it, the step is of the first epoch)"


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


@dataclass(frozen=True)
class Parent:
    """The commit that a branch began with. lineage : None if it had none; commit : the digest of its last file"""

    lineage: str | None
    epoch: str | None
    step: int
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
        parent = state.get("parent")
        return cls(
            state["lineage"],
            tuple(Epoch(name, int(step), *map(bool, rest)) for name, step, *rest in state["epochs"]),
            None if parent is None else Parent(*parent),
        )

    def get_state(self) -> dict[str, Any]:
        """Return it as plain data, for the positions of a commit."""
        state = {"lineage": self.id, "epochs": [epoch.get_state() for epoch in self.epochs]}
        return state if self.parent is None else {**state, "parent": list(astuple(self.parent))}

    @property
    def current(self) -> Epoch:
        return self.epochs[-1]

    def started(self, step: int, changes_tables: bool = False) -> Lineage:
        """Return the lineage with one more epoch, from a step on. changes_tables : whether other tables begin with it

        Epochs that have not come to a step of their own are dropped: no reader has seen one.
        """
        begun = (epoch for epoch in self.epochs[1:] if epoch.first_own_step <= step)
        epochs = (self.epochs[0], *begun, Epoch(secrets.token_hex(8), step, changes_tables))
        return replace(self, epochs=epochs[-MOST_EPOCHS:])

    def epoch_of(self, step: int) -> str:
        """Return the epoch that contains a step: one at which an epoch begins belongs to the epoch before, unless the
        tables change there."""
        earlier = [epoch.id for epoch in self.epochs if epoch.first_own_step <= step]
        return earlier[-1] if earlier else self.epochs[0].id

    def check(self, lineage: str, epoch: str | None, step: int) -> None:
        """Raise DeltasGoneError if the rows that a reader has at a step need not be those of this history.

        epoch : None: the first one
        """
        if lineage != self.id:
            raise DeltasGoneError(
                "this service's state is another one than that of the step asked for (it was restarted without its "
                f"checkpoint, or with another one); {ANEW}"
            )
        hint = _NO_EPOCH if epoch is None else ""
        ids = [each.id for each in self.epochs]
        if (epoch or FIRST_EPOCH) not in ids:
            raise DeltasGoneError(
                f"step {step} is of an epoch that is not in the history of this service (it was restored from an older "
                f"commit or from a copy, or has had more than {MOST_EPOCHS} epochs since); {ANEW}{hint}"
            )
        later = self.epochs[ids.index(epoch or FIRST_EPOCH) + 1 :]
        for change in (each for each in later if each.changes_tables):
            raise DeltasGoneError(f"the tables of this service have changed at step {change.first_step}; {ANEW}{hint}")
        for following in later[:1]:
            if step > following.first_step:
                raise DeltasGoneError(
                    f"this service was restored from step {following.first_step} and has other steps since then than "
                    f"those up to step {step} of an earlier epoch; {ANEW}{hint}"
                )
