"""Kill it anywhere: a sample of what ``make faults`` runs in full. Seeded; a failure tells how to see it again."""

import errno

import pytest
from faults.harness import Harness, deliver
from ipc import log


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    with Harness(tmp_path_factory.mktemp("faults")) as made:
        yield made


@pytest.mark.evidence
@pytest.mark.parametrize("number", range(4))
@pytest.mark.promise("A run that was killed resumes to the bits of one that was not")
def test_a_run_killed_at_a_random_moment_resumes_to_the_same_state(harness, number):
    harness.check(f"moment:{number}")


@pytest.mark.sampled("1-kill", "9-kill-half", "20-short")
@pytest.mark.parametrize("kind", ["kill", "kill-half", "eio", "enospc", "short"])
@pytest.mark.parametrize("number", [1, 9, 20])  # every run has so many; how many more is the writing thread's matter
def test_a_run_ended_at_a_file_operation_resumes_to_the_same_state(harness, kind, number):
    assert harness.check(f"{kind}:{number}")


@pytest.fixture(scope="module")
def in_passes(tmp_path_factory):
    with Harness(tmp_path_factory.mktemp("passes"), passes=3) as made:
        yield made


@pytest.mark.evidence
@pytest.mark.parametrize("name", ["moment:1", "kill:150", "kill-half:320", "eio:240", "enospc:420", "limit:20000"])
def test_a_replay_in_passes_that_ended_early_resumes_to_the_state_of_one_run(in_passes, name):
    in_passes.check(name)


@pytest.fixture(scope="module")
def of_cached_tables(tmp_path_factory):
    with Harness(tmp_path_factory.mktemp("cached"), placement="cached") as made:
        yield made


@pytest.mark.evidence
@pytest.mark.parametrize("name", ["moment:2", "kill:20", "kill-half:40", "eio:30", "enospc:50", "limit:20000"])
def test_a_replay_with_rows_in_flight_that_ended_early_resumes_to_the_same_state(of_cached_tables, name):
    of_cached_tables.check(name)


@pytest.fixture(scope="module")
def of_shared_tables(tmp_path_factory):
    with Harness(tmp_path_factory.mktemp("shared"), placement="shared") as made:
        yield made


@pytest.mark.sampled("moment:2")
@pytest.mark.parametrize(
    "name", ["moment:2", "moment:5", "kill:20", "kill-half:40", "eio:30", "enospc:50", "limit:20000"]
)
def test_a_replay_with_shared_tables_that_ended_early_resumes_to_the_same_state_and_shares_it(of_shared_tables, name):
    of_shared_tables.check(name)


@pytest.mark.parametrize("limit", [2000, 40_000])
def test_files_may_not_grow_beyond_a_limit(harness, limit):
    assert harness.check(f"limit:{limit}")


@pytest.mark.promise("A commit stays readable while the disk is full")
def test_a_commit_stays_readable_while_the_disk_stays_full(harness):
    argv = harness.argv("full")
    assert harness.run([*argv, "--limit", "21"])["code"] == 0
    for _ in range(2):
        answer = harness.run(argv, fault=["failing", 1, errno.ENOSPC, True])
        assert (answer["code"], answer["err"].count("\n")) == (6, 1)
        assert "no space left on device; free some space" in answer["err"]
    assert harness.unbroken in harness.run(argv)["out"]


# ---- our own log, delivered twice, in another order, with a gap


@pytest.mark.parametrize(
    ("change", "order", "problem"),
    [
        ("repeated", lambda n: [*n[:21], *n[20:]], "expected batch 21 of the log, got 20: delivered again"),
        ("swapped", lambda n: [*n[:20], 21, 20, *n[22:]], "expected batch 20 of the log, got 21: a gap, batch 20 is"),
        ("missing", lambda n: [*n[:20], *n[23:]], "expected batch 20 of the log, got 23: a gap, batches 20 to 22 are"),
        ("begins late", lambda n: n[20:], "expected batch 0 of the log, got 20: a gap, batches 0 to 19 are missing"),
    ],
)
def test_a_log_whose_numbers_do_not_follow_is_named_and_the_frames_before_are_kept(
    harness, change, order, problem, tmp_path
):
    path = tmp_path / "log.arrows"
    path.write_bytes(log(harness.batches))
    deliver(path, order(list(range(len(harness.batches)))))
    argv = harness.argv(change.replace(" ", "-"), log=path)
    answer = harness.run(argv)
    assert answer["code"] == 3
    assert problem in answer["err"]
    resumed = harness.run(harness.argv(change.replace(" ", "-")))
    assert (resumed["code"], harness.unbroken in resumed["out"]) == (0, True), resumed["err"]
