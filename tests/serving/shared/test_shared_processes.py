"""Writers and readers in separate processes: no torn row and no mixture of steps, whichever is killed, and when."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import shared_processes
from evidence import IS_LONG
from limits import HANG_S

import penstock as ps

SCRIPT = Path(shared_processes.__file__)
FOREVER = 10**6
# The longer ones are for ``make evidence``.
SECONDS = pytest.mark.parametrize("seconds", [1.5, 60.0 if IS_LONG else 6.0])
KILLS = pytest.mark.parametrize("kills", [6, 200 if IS_LONG else 20])


def started(*arguments):
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def writing(tmp_path):
    """A process that writes the tables of ``tmp_path``; call it for another one."""
    processes = []

    def start(role="write", steps=FOREVER):
        processes.append(started(role, tmp_path, steps))
        assert processes[-1].stdout.readline() == "ready\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def outcome_of(reader):
    text = reader.communicate(timeout=HANG_S)[0]
    assert reader.returncode == 0, text
    return json.loads(text)


@pytest.mark.evidence
@SECONDS
@pytest.mark.promise("No row that another process reads is torn or of two steps")
def test_no_row_that_other_processes_read_is_torn_or_of_two_steps(tmp_path, writing, seconds):
    writing()
    readers = [started("read", tmp_path, seconds, consistent) for consistent in ("", "", "consistent")]
    outcomes = [outcome_of(reader) for reader in readers]
    assert all(outcome["rows"] > 10_000 for outcome in outcomes[:2])
    assert all(outcome["step"] > 0 and not outcome["refused"] for outcome in outcomes)


def test_lineage_and_epoch_are_read_as_they_were_written(tmp_path, writing):
    writing("rename")
    reader = ps.Reader(tmp_path)
    versions = {reader.version.at(0) for _ in range(50_000)}
    assert versions == {ps.Version.of(letter * 64, letter * 64, 0) for letter in "abcd"}


@pytest.mark.evidence
@KILLS
def test_a_writer_killed_at_any_moment_leaves_rows_that_are_right_or_refused(tmp_path, writing, kills):
    outcomes = []
    for number in range(kills):
        process = writing()
        watch = shared_processes.Watch(tmp_path, consistent=False)
        time.sleep(0.002 * (number % 17))
        process.send_signal(signal.SIGKILL)
        process.wait()
        try:
            for _ in range(50):
                watch.read()
            outcomes.append("")
        except ps.StateError as error:
            outcomes.append(str(error))
    refused = [text for text in outcomes if text]
    assert all("is written, and its writer has ended; start the writer again" in text for text in refused), refused
    assert all("table 'left': the page of the row of id" in text or "table 'right'" in text for text in refused)


def test_rows_of_one_step_are_refused_at_once_if_the_writer_has_ended_within_it(tmp_path, writing):
    process = writing("begin", steps=3)
    reader = ps.Reader(tmp_path)
    with pytest.raises(ps.ReadTimeoutError):
        reader.lookup("left", [0], consistent=True, timeout_ms=20)
    process.kill()
    process.wait()
    with pytest.raises(ps.StateError, match=r"step .* runs, .* and its writer has ended; start the writer again"):
        reader.lookup("left", [0], consistent=True, timeout_ms=60_000)


def test_a_reader_continues_when_its_writer_is_killed_and_starts_again(tmp_path, writing):
    watch = None
    for _ in range(3):
        process = writing()
        watch = watch or shared_processes.Watch(tmp_path, consistent=True)
        watch.read()
        process.kill()
        process.wait()
    assert watch.num_rows == 3000


@pytest.mark.sampled("6")
@KILLS
def test_killed_readers_change_nothing_for_the_writer_and_the_others(tmp_path, writing, kills):
    writing()
    for number in range(kills):
        reader = started("read", tmp_path, 60)
        time.sleep(0.1 + 0.01 * (number % 10))
        reader.kill()
        reader.communicate()
    watch = shared_processes.Watch(tmp_path, consistent=True)
    watch.read()
    before = watch.reader.version.step
    time.sleep(0.1)
    assert watch.reader.version.step > before
