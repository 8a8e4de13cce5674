"""Versions, and the epochs of a lineage against an oracle: random histories of starts, steps, copies and returns."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import DeltasGoneError, UsageError
from penstock.model.version import MOST_EPOCHS, Lineage, Version

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
        """What a reader gets of a published step: its version, and the rows, which the steps so far identify."""
        return self.lineage.at(step), self.history[:step]

    def accepts(self, version):
        try:
            self.lineage.check(version)
        except DeltasGoneError:
            return False
        return version.step <= len(self.history)


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
            first = server.lineage.epochs[-1].first_step
            step = min(first + number, server.published)
            version, rows = server.read(step)
            assert readers.setdefault(version, rows) == rows  # the version identifies the rows
            for other, its_rows in readers.items():
                if version.follows(other):
                    assert rows[: other.step] == its_rows
                    assert not other.follows(version)
        for server in servers:
            for version, rows in readers.items():
                step = version.step
                if server.accepts(version):
                    assert rows == server.history[:step]
                elif step <= len(server.history):
                    assert rows != server.history[:step], "a reader of this very history was refused"


def test_a_step_at_which_an_epoch_begins_belongs_to_the_one_before():
    lineage = Lineage.new(0)
    assert lineage.at(0).epoch == lineage.at(7).epoch == "0"
    second = lineage.started(7)
    assert [second.at(step).epoch for step in (0, 7)] == ["0", "0"]
    assert second.at(8).epoch == second.ahead(7).epoch == second.epochs[-1].id != "0"
    assert second.epochs[1].first_step == 7


def test_epochs_without_a_step_are_merged_and_the_newest_64_are_kept():
    lineage = Lineage.new(5)
    for _ in range(10):
        lineage = lineage.started(5)
    assert [epoch.first_step for epoch in lineage.epochs] == [5, 5]
    for step in range(6, 6 + MOST_EPOCHS):
        lineage = lineage.started(step)
    assert [epoch.first_step for epoch in lineage.epochs] == list(range(6, 6 + MOST_EPOCHS))
    assert lineage.at(69).epoch == lineage.epochs[-2].id
    with pytest.raises(DeltasGoneError, match="has had more than 64 epochs since"):
        lineage.check(Version.of(lineage.id, "0", 5))


def test_errors_say_what_happened():
    lineage = Lineage.new(0).started(10)
    lineage.check(Version.of(lineage.id, "0", 10))
    lineage.check(lineage.at(11))
    with pytest.raises(DeltasGoneError, match=r"restored from step 10 and has other steps since then .* up to step 11"):
        lineage.check(Version.of(lineage.id, "0", 11))
    with pytest.raises(DeltasGoneError, match="of an epoch that is not in the history of this service"):
        lineage.check(Version.of(lineage.id, "abc", 3))
    with pytest.raises(DeltasGoneError, match="this service's state is another one"):
        lineage.check(Version("abc-0-0"))


def test_an_epoch_that_changes_the_tables_has_its_first_step_and_refuses_every_reader_from_before():
    before = Lineage("abc").started(5)
    lineage = before.started(8, changes_tables=True).started(8).started(8)  # later starts take no step
    changed = lineage.epochs[-2]
    assert [epoch.first_step for epoch in lineage.epochs] == [0, 5, 8, 8]
    assert lineage.at(8).epoch == changed.id
    assert lineage.at(7).epoch == before.epochs[-1].id
    lineage.check(Version.of("abc", changed.id, 8))
    for epoch, step in (("0", 3), ("0", 5), (before.epochs[-1].id, 8)):
        with pytest.raises(DeltasGoneError, match="the tables of this service have changed at step 8"):
            lineage.check(Version.of("abc", epoch, step))
    again = lineage.started(8, changes_tables=True)
    with pytest.raises(DeltasGoneError, match="have changed at step 8"):
        again.check(Version.of("abc", changed.id, 8))
    assert Lineage.from_state(again.get_state()) == again


NAMES = st.text("abcXYZ019_", min_size=1, max_size=64)
VERSIONS = st.builds(
    lambda names, step: Version.of(*names, step), st.just(("", "")) | st.tuples(NAMES, NAMES), st.integers(-9, 9)
)


@given(VERSIONS, VERSIONS)
def test_a_version_is_the_one_that_its_text_names_and_at_most_one_of_two_follows(one, other):
    assert Version(str(one)) == one == eval(repr(one))
    assert hash(Version(str(one))) == hash(one)
    assert one.at(one.step) == one
    assert not one.follows(one)
    assert (one == other) + one.follows(other) + other.follows(one) == (one.at(0) == other.at(0))


@pytest.mark.parametrize("text", ["", "a-1", "a-b-", "a-b-c", "-a-1", "a b-0-1", "a-0-1 ", "1.0", "é-0-1", 3, b"1"])
def test_any_other_text_is_refused_in_one_line(text):
    with pytest.raises(UsageError, match=r"^expected a version, such as .*, got .*$"):
        Version(text)


def test_a_version_cannot_be_changed():
    with pytest.raises(AttributeError):
        Version("a-0-1").step = 2
