"""When the thread that writes a commit may work, as the steps allow it."""

import threading

import pytest
from checkpoints import LOG, engine_of
from limits import HANG_S, until

from penstock.checkpoint.arrays import SavedTables
from penstock.checkpoint.commit_session import CommitSession
from penstock.checkpoint.writer import Pace


@pytest.fixture
def worker():
    """worker(pace) → pieces done: a list that a thread appends to, which uses up a second per piece."""
    ends, threads = [], []

    def start(pace, pieces=10):
        done = []

        def work():
            for piece in range(pieces):
                pace.add_work(1.0 if piece else 0.0)
                done.append(piece)

        thread = threading.Thread(target=work)
        ends.append(pace)
        threads.append(thread)
        thread.start()
        return done, thread

    yield start
    for pace in ends:
        pace.expedite()
    for thread in threads:
        thread.join()


def reaches(done, count):
    """Whether so many pieces are done, and no more, after a wait that is long for a thread and short for a test."""
    until(lambda: len(done) >= count)
    threading.Event().wait(0.02)
    return len(done) == count


def test_a_commit_writes_only_as_much_as_steps_allow(worker):
    pace = Pace()
    done, _ = worker(pace)
    assert reaches(done, 0)
    pace.allow(2.5)
    assert reaches(done, 3)  # what was begun is ended; the half second that it took too long is owed
    pace.allow(0.4)
    assert reaches(done, 3)
    pace.allow(1.0)
    assert reaches(done, 4)


def test_an_expedited_commit_does_all_work_and_leaves_no_debt(worker):
    pace = Pace()
    done, thread = worker(pace)
    pace.expedite()
    thread.join()
    assert len(done) == 10
    pace.allow(1.5)  # from here on paced again, with nothing owed
    later, _ = worker(pace)
    assert reaches(later, 2)


@pytest.mark.parametrize("expedited", [False, True])
def test_a_wait_ends_with_the_next_allowance_and_at_once_when_expedited(expedited):
    pace, there = Pace(), []
    if expedited:
        pace.expedite()
    thread = threading.Thread(target=lambda: pace.wait_for(lambda: there))
    thread.start()
    there.append(1)
    pace.wake()  # while it is not expedited this wakes no thread
    if not expedited:
        pace.allow(0.0)
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_while_no_frame_arrives_a_run_ends_its_commit_and_then_sleeps(tmp_path, monkeypatch):
    """Asleep, its background thread does not take the gate's lock."""
    folder, checks, advance, steps = tmp_path / "c", [], CommitSession.advance, []

    def counted(session, idle=False):
        checks.append(idle)
        advance(session, idle)

    monkeypatch.setattr(CommitSession, "advance", counted)

    def is_asleep():
        before = len(checks)
        threading.Event().wait(0.3)
        return len(checks) == before

    def frames():
        yield from LOG[:4]  # the last one is in the reader, not yet in the gate
        assert any(is_asleep() for _ in range(100))  # fails, instead of hanging, if it never sleeps
        steps.append(SavedTables(folder).commit.contents["gate"]["global_step"])

    assert engine_of().run(frames(), checkpoint=folder, every=1).steps == 1
    assert steps == [1]
