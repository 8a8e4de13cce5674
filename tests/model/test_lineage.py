"""The epochs of a lineage, against an oracle: random histories of starts, steps, commits, copies and returns."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import DeltasGoneError
from penstock.model.lineage import MOST_EPOCHS, Lineage

STEPS = itertools.count()


@dataclass
class Commit:
    """history : the identity of every step so far, from the first one"""

    history: tuple[int, ...]
    lineage: Lineage


@dataclass
class Server:
    """A service over a folder of commits. It publishes only what is durable. None: killed"""

    commits: list[Commit]
    history: tuple[int, ...] = ()
    lineage: Lineage | None = None
    published: int = 0

    def start(self, number=-1):
        """Start from a commit: the newest, or after the removal of those after ``number``."""
        if self.commits:
            del self.commits[len(self.commits) + number + 1 :]
            last = self.commits[-1]
            self.history, self.lineage = last.history, last.lineage.started(len(last.history))
        else:
            self.history, self.lineage = (), Lineage.new(0)
        self.commit()

    def commit(self):
        self.commits.append(Commit(self.history, self.lineage))
        self.published = len(self.history)

    def step(self, count):
        self.history += tuple(next(STEPS) for _ in range(count))

    def read(self, step):
        """What a reader gets of a published step: its position, and the rows, which the steps so far identify."""
        return (self.lineage.id, self.lineage.epoch_of(step), step), self.history[:step]

    def accepts(self, position):
        lineage, epoch, step = position
        try:
            self.lineage.check(lineage, epoch, step)
        except DeltasGoneError:
            return False
        return step <= len(self.history)


KINDS = st.sampled_from(["start", "back", "copy", "step", "commit", "kill", "read"])
EVENTS = st.lists(
    st.tuples(KINDS, st.integers(0, 7), st.integers(0, 9)),
    max_size=60,
)


@settings(max_examples=500, deadline=None)
@given(EVENTS)
def test_a_reader_is_accepted_only_with_the_rows_of_its_step(events):
    servers, readers = [Server([])], {}
    servers[0].start()
    for kind, number, which in events:
        server = servers[which % len(servers)]
        if kind == "copy":
            servers.append(Server(list(server.commits)))
            servers[-1].start()
        elif kind in ("start", "kill"):  # a kill loses the steps after the last commit
            server.start()
        elif kind == "back":
            server.start(-1 - number % len(server.commits))
        elif kind == "step":
            server.step(number)
        elif kind == "commit":
            server.commit()
        else:  # of a service, any published step of this start: deltas and tables name no earlier ones
            first = server.lineage.current.first_step
            step = min(first + number, server.published)
            position, rows = server.read(step)
            assert readers.setdefault(position, rows) == rows  # the position identifies the rows
        for server in servers:
            for position, rows in readers.items():
                step = position[2]
                if server.accepts(position):
                    assert rows == server.history[:step]
                elif step <= len(server.history):
                    assert rows != server.history[:step], "a reader of this very history was refused"


def test_a_step_at_which_an_epoch_begins_belongs_to_the_one_before():
    lineage = Lineage.new(0)
    assert lineage.epoch_of(0) == lineage.epoch_of(7) == "0"
    second = lineage.started(7)
    assert [second.epoch_of(step) for step in (0, 7)] == ["0", "0"]
    assert second.epoch_of(8) == second.current.id != "0"
    assert second.epochs[1].first_step == 7


def test_epochs_without_a_step_are_merged_and_the_newest_64_are_kept():
    lineage = Lineage.new(5)
    for _ in range(10):
        lineage = lineage.started(5)
    assert [epoch.first_step for epoch in lineage.epochs] == [5, 5]
    for step in range(6, 6 + MOST_EPOCHS):
        lineage = lineage.started(step)
    assert [epoch.first_step for epoch in lineage.epochs] == list(range(6, 6 + MOST_EPOCHS))
    assert lineage.epoch_of(69) == lineage.epochs[-2].id
    with pytest.raises(DeltasGoneError, match="has had more than 64 epochs since"):
        lineage.check(lineage.id, None, 5)


def test_errors_say_what_happened_and_what_to_give():
    lineage = Lineage.new(0).started(10)
    lineage.check(lineage.id, None, 10)
    lineage.check(lineage.id, "0", 10)
    lineage.check(lineage.id, lineage.current.id, 11)
    with pytest.raises(
        DeltasGoneError, match=r"restored from step 10 and has other steps since then .* up to step 11"
    ) as old:
        lineage.check(lineage.id, "0", 11)
    assert "epoch=" not in str(old.value)
    with pytest.raises(DeltasGoneError, match="give epoch= of that table or delta too"):
        lineage.check(lineage.id, None, 11)
    with pytest.raises(DeltasGoneError, match="of an epoch that is not in the history of this service"):
        lineage.check(lineage.id, "abc", 3)
    with pytest.raises(DeltasGoneError, match="this service's state is another one"):
        lineage.check("abc", "0", 0)


def test_an_epoch_that_changes_the_tables_has_its_first_step_and_refuses_every_reader_from_before():
    before = Lineage("abc").started(5)
    lineage = before.started(8, changes_tables=True).started(8).started(8)  # later starts take no step
    changed = lineage.epochs[-2]
    assert [epoch.first_step for epoch in lineage.epochs] == [0, 5, 8, 8]
    assert lineage.epoch_of(8) == changed.id
    assert lineage.epoch_of(7) == before.current.id
    lineage.check("abc", changed.id, 8)
    for epoch, step in ((None, 3), ("0", 5), (before.current.id, 8)):
        with pytest.raises(DeltasGoneError, match="the tables of this service have changed at step 8"):
            lineage.check("abc", epoch, step)
    again = lineage.started(8, changes_tables=True)
    with pytest.raises(DeltasGoneError, match="have changed at step 8"):
        again.check("abc", changed.id, 8)
    assert Lineage.from_state(again.get_state()) == again
