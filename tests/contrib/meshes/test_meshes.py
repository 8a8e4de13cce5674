"""Engines over a mesh that spans processes: each process pushes its frames, and all have the same tables."""

import functools

import mesh_jobs as jobs
import numpy as np
import pytest
from device_table import bits, stepped
from mesh_processes import all_started, started

import penstock as ps


def folded(frames):
    """Return {id: (left fold of its rows, number of frames that contain it)} of frames in order."""
    sums = {}
    for ids, grads in frames:
        for row_id, grad in zip(ids.tolist(), grads, strict=True):
            total, count = sums.get(row_id, (None, 0))
            sums[row_id] = grad.copy() if total is None else total + grad, count
        for row_id in set(ids.tolist()):
            sums[row_id] = sums[row_id][0], sums[row_id][1] + 1
    return sums


def over_processes(frames, mean):
    """Return ids and gradients of one step: a fold of each process's frames, then of their sums by rank.

    frames : of each process
    """
    totals = {}
    for sums in map(folded, frames):
        for row_id, (grad, count) in sums.items():
            total, before = totals.get(row_id, (None, 0))
            totals[row_id] = grad if total is None else total + grad, before + count
    ids = np.array(sorted(totals), np.int64)
    grads = [grad / np.float32(count) if mean else grad for grad, count in map(totals.get, ids.tolist())]
    return ids, np.array(grads, np.float32)


@functools.cache
def initial_state():
    return jobs.state(ps.Engine(jobs.config_of()))


def oracle(name, steps, mean):
    """Return the parts of a table after steps; each step has the frames of every process."""
    rule = ps.Engine(jobs.config_of()).config.table(name).rule
    parts = list(initial_state()[name].values())
    for step, frames in enumerate(steps):
        frames = [[frame[name] for frame in process_frames if name in frame] for process_frames in frames]
        updates = [over_processes(frames, mean)]
        if name == "s":  # without gradient accumulation: one update per frame
            updates = [over_processes([[frame]], False) for process_frames in frames for frame in process_frames]
        for ids, grads in updates:
            if len(ids) or rule.non_lazy:
                lr = rule.rate_at(0.05 if name in "mn" else 0.1, step)  # as in jobs.config_of
                parts = stepped(rule, lr, parts, ids, grads.reshape(len(ids), parts[0].shape[1]))
    return parts


@pytest.mark.evidence
@pytest.mark.parametrize(("count", "devices"), [(2, 1), (2, 3), (4, 1)])
def test_tables_are_those_of_a_fold_per_process_and_then_over_processes(count, devices, tmp_path):
    result = started("applied", count, devices, tmp_path)
    frames = [[jobs.frame_of(rank, number) for number in range(6)] for rank in range(count)]
    frames[0][4] = {}  # stale
    steps = [[frame[number : number + 2] for frame in frames] for number in (0, 2, 4)]
    for tables, _, state_hash in result:
        assert state_hash == result[0][2]
        for name in set(jobs.ROWS) - {"h"}:
            parts = oracle(name, steps, mean=True)
            assert [bits(part) for part in tables[name].values()] == [bits(part) for part in parts], name
    # Stale frames, frames in the gate, global step.
    assert [counts for _, counts, _ in result] == [(rank == 0, 0, 3) for rank in range(count)]


def hashes_of_one_process(count):
    hashes = []
    for reduction, sharding in (("mean", "DIV"), ("sum", "MOD")):
        engine = ps.Engine(jobs.config_of(sharding), num_required=count, reduction=reduction)
        for number in range(4):
            for rank in range(count):
                engine.apply(jobs.distinct(jobs.frame_of(rank, number)))
        hashes.append(engine.state_hash())
    return hashes


@pytest.mark.evidence
@pytest.mark.parametrize("layout", ["plain", "tiled"])
def test_frames_without_repeated_rows_give_the_bits_of_one_process_in_place(layout, tmp_path):
    result = started("one_frame_per_step", 2, 2, tmp_path, PENSTOCK_LAYOUT=layout)
    assert result == [hashes_of_one_process(2)] * 2


@pytest.mark.evidence
def test_frames_too_large_for_one_dispatch_give_the_same_bits(tmp_path):
    (config, state_hash), (_, other) = started("sliced", 2, 1, tmp_path)
    engine = ps.Engine(config, num_required=2)
    for number in range(2):
        for rank in range(2):
            engine.apply(jobs.wide_frame(rank, number))
    assert state_hash == other == engine.state_hash()


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """name → the results of the jobs that ``make test`` runs, in two processes; and their folder"""
    names, folder = ("ran", "trained", "frozen", "failed"), tmp_path_factory.mktemp("processes")
    return dict(zip(names, all_started(names, 2, 2, folder), strict=True)), folder


def test_sources_of_different_lengths_are_read_to_the_end_of_the_longest(of_two):
    results, folder = of_two
    reads_to_the_longest(results["ran"], folder)


@pytest.mark.evidence
def test_sources_of_three_processes_are_read_to_the_end_of_the_longest(tmp_path):
    reads_to_the_longest(started("ran", 3, 1, tmp_path), tmp_path)


def reads_to_the_longest(result, folder):
    count = len(result)
    lengths = [3 + rank for rank in range(count)]
    rounds = [[rank for rank in range(count) if number < lengths[rank]] for number in range(max(lengths))]
    num_accumulated, steps = 0, []  # steps: the frames of each, by process
    frames = [[] for _ in range(count)]
    for number, ranks in enumerate(rounds):
        for rank in ranks:
            frames[rank].append(jobs.small_frame(rank, number))
        num_accumulated += len(ranks)
        if num_accumulated >= count or number == max(lengths) - 1:
            steps.append(frames)
            num_accumulated, frames = 0, [[] for _ in range(count)]
    engine = ps.Engine(jobs.small_config())
    parts = list(engine.retrieve_parameters("t").values())
    for frames in steps:
        parts = stepped(engine.config.table("t").rule, 0.1, parts, *over_processes(frames, mean=True))
    for rank, (counts, tables, state_hash, rows) in enumerate(result):
        assert counts == (lengths[rank], len(steps), 0, 5 * lengths[rank])
        assert [bits(part) for part in tables["t"].values()] == [bits(part) for part in parts]
        assert rows.tobytes() == parts[0][[rank, 20, 3 * rank]].tobytes()
        assert state_hash == result[0][2]
    engine.read_tables(folder / "tables")
    assert [bits(part) for part in engine.retrieve_parameters("t").values()] == [bits(part) for part in parts]


def test_every_process_looks_up_its_own_batch_and_sends_its_gradients(of_two):
    result = of_two[0]["trained"]
    wanted = result[0][0].copy()
    for rank in range(2):
        for row_id, count in zip(*np.unique(jobs.features_of(rank), return_counts=True), strict=True):
            wanted[row_id] -= np.float32(0.5) * np.float32((rank + 1) * count)
    for rank, (before, activations, after, step) in enumerate(result):
        assert activations.tobytes() == before[jobs.features_of(rank)[:, 0]].tobytes()
        np.testing.assert_allclose(after, wanted, rtol=1e-6)
        assert after.tobytes() == result[0][2].tobytes()
        assert step == 1


def test_a_frozen_table_keeps_its_vectors_in_all_processes_which_have_the_same(of_two):
    results = of_two[0]["frozen"]
    assert len({state_hash for *_, state_hash, _ in results}) == 1
    for after, is_trained, step, _, problem in results:
        assert after["word"].keys() == {"parameters"}
        assert after["word"]["parameters"].ravel().tolist() == list(range(96))
        assert is_trained
        assert step == 3
        assert "initial vectors" in problem
        assert "\n" not in problem


@pytest.mark.evidence
def test_a_step_uses_the_learning_rates_of_the_last_process(tmp_path):
    assert started("served_rates", 2, 1, tmp_path) == [(0.5,)] * 2


def test_all_processes_raise_the_error_of_one_and_continue(of_two):
    result = of_two[0]["failed"]
    (first, first_step), (second, second_step) = result
    assert first_step == second_step == 1
    for errors in (first, second):
        assert (errors["same"], errors["after"], errors["steps"]) == (True, True, 2)
        for name in ("save", "commit", "deltas", "stage"):
            assert errors[name][0] == "UsageError", name
            assert "write neither commits nor deltas: save engine.table()" in errors[name][1], name
    order = "every process must make the same calls, with the same configuration, in the same order"
    row = (
        "apply('t'): row 1, column 'id': expected 0 <= id < 24 (vocabulary_size of table 't'), got 99 [id_out_of_range]"
    )
    assert second["row"] == ("InputError", row)
    large = "row 1: expected a sum that is finite as float32, and with this row that of id 1 of table 't' is not"
    assert large in second["sum"][1]
    gone = "the disk is gone"
    assert second["source"] == ("OSError", gone)
    wanted = {
        "row": ("InputError", f"process 1: {row}"),
        "sum": ("InputError", f"process 1: {second['sum'][1]}"),
        "call": ("UsageError", f"process 0 is at a lookup in table 't' and process 1 at flush(): {order}"),
        "source": ("PeerError", f"process 1 stopped with OSError: {gone}"),
    }
    assert {name: first[name] for name in wanted} == wanted
    assert first["missing"][1].startswith("process 1: ")
    assert "missing.arrows" in first["missing"][1]
    assert order in first["config"][1]
    assert "table 'd' is dynamic, and the mesh spans 2 processes" in first["dynamic"][1]
    placed = (
        "table 'table_0' has the placement CACHED, and the mesh spans 2 processes: create the engine on the devices"
    )
    assert placed in first["placed"][1]
    assert "of every process, got 1 of process 0, 2 of process 1" in first["uneven"][1]
    for errors in (first, second):
        assert errors["restore"][0] == "UsageError"
        assert errors["restore"][1].startswith("the mesh spans 2 processes, and checkpoints are of one")


@pytest.mark.evidence
def test_a_process_without_memory_ends_the_call_in_all_processes(tmp_path):
    """No process waits for rows of another, and tables are unusable after a step that only some processes applied."""
    first, last = started("without_memory", 2, 1, tmp_path)
    assert last[:2] == [("MemoryError", "no room for rows")] * 2
    assert first[:2] == [("PeerError", "process 1 stopped with MemoryError: no room for rows")] * 2
    for errors in (first, last):
        assert errors[2][0] == "StateError"
        assert "an earlier step failed half way" in errors[2][1]


def test_orbax_saves_the_rows_of_each_process_and_any_other_job_restores_them(tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="an extra: pip install 'penstock[orbax]'")
    wanted = {name: rows.tobytes() for name, rows in started("saved", 2, 2, tmp_path)[0].items()}
    engine = ps.Engine(jobs.small_config(), seed=1)
    engine.read_tables(tmp_path / "orbax")
    for actual in (engine.retrieve_parameters("t"), *started("loaded", 3, 1, tmp_path)):
        assert {name: rows.tobytes() for name, rows in actual.items()} == wanted


@pytest.mark.evidence
def test_a_kernel_is_used_only_if_every_process_can_use_it(tmp_path):
    (first, mixed), (second, other) = started("with_a_kernel", 2, 1, tmp_path)
    assert [variant for variant, *_ in first] == [variant for variant, *_ in second] == ["pallas", "xla", "xla", "xla"]
    assert {state_hash for *_, state_hash in first + second} == {first[0][4]}
    assert [kept for *_, kept, _ in first + second] == [1] * 8  # each process stores its own canary's verdict
    failed = "the kernel failed its canary, XLA's program updates: "
    fell_back = "; XLA's program updates from here on"
    large = "step 0, table 't': the kernel does not compile for 128 lines: "
    moved = "step 0, table 't': the step moved the table instead of updating it in place"
    assert [notes for _, notes, *_ in first] == [
        (),
        (f"table 't': {failed}in process 1",),
        (f"{large}it fails in another process{fell_back}",),
        (f"{moved}{fell_back}",),
    ]
    (_, (spoilt,), *_), (_, (compiled,), *_) = second[1:3]
    assert spoilt.startswith(f"table 't': {failed}step 0: line ")
    assert compiled == f"{large}scoped vmem: 16.03 MB of 16.00 MB{fell_back}"
    assert [problems for _, _, problems, *_ in first + second] == [0, 1, 1, 1] * 2
    assert mixed.startswith("process 0 is at the canary of table 't' and process 1 at Engine(…), tables by ['xla']")
    assert "the canary of table 't'" in other
