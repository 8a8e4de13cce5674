"""Tables that the CPU's own update keeps: reading, writing and copying them, and what is refused."""

import signal
from contextlib import suppress

import numpy as np
import pytest
from device_table import TEAM, bits, host_table, parts_of, some_rows

import penstock as ps
from penstock.model.updates import UpdateRule

ADAM = UpdateRule("adam", 2, (("beta1", 0.5), ("beta2", 0.75), ("epsilon", 0.25)))
ADAGRAD = UpdateRule("adagrad", 1)


@pytest.mark.parametrize("devices", [1, 3])
def test_reads_take_any_ids_and_writes_touch_one_part(devices, mesh_of):
    table = host_table(mesh_of, ADAM, 5000, 6, devices, mod=False)
    rng = np.random.default_rng(0)
    wanted = rng.standard_normal((5000, 6), np.float32)
    order = rng.permutation(5000)
    table.write(order, wanted[order], part=1)
    ids = rng.integers(0, 5000, 9000)
    assert table.read(ids, 1).tobytes() == wanted[ids].tobytes()
    assert (table.read(ids, 0) == 0).all()
    assert (table.read(ids, 2) == 0.5).all()
    assert np.concatenate(list(table.stream(1))).tobytes() == wanted.tobytes()
    assert table.read(np.zeros(0, np.int64)).shape == (0, 6)


@pytest.mark.parametrize("bad", [-1, 3000, 2**40, -(2**63), 2**63 - 1])
def test_an_id_outside_the_table_is_an_error_and_no_crash(bad, mesh_of):
    table = host_table(mesh_of, ADAGRAD, 3000, 4)
    with pytest.raises(ValueError, match="an id outside the table 't'; all other rows were handled"):
        table.apply(np.array([5, bad, 7]), np.ones((3, 4), np.float32), 0.1)
    assert (table.read(np.array([5, 7])) != 0).all()


def test_arrays_of_other_shapes_are_refused_before_anything_runs(mesh_of):
    table = host_table(mesh_of, ADAGRAD, 3000, 4)
    with pytest.raises(ValueError, match="expected rows of 4 floats, got 5"):
        table.apply(np.arange(3), np.ones((3, 5), np.float32), 0.1)
    with pytest.raises(ValueError, match="expected 2 rows for as many ids, got 3"):
        table.apply(np.arange(2), np.ones((3, 4), np.float32), 0.1)
    with pytest.raises(ValueError, match="expected 0 <= part < 2, got 2"):
        table.write(np.arange(2), np.ones((2, 4), np.float32), 2)
    table.apply(np.arange(3), np.ones((3, 4), np.float32), 0.1)
    assert (table.read(np.arange(3)) != 0).all()


def test_an_interrupted_lookup_leaves_no_thread_at_work():
    num_rows = 200_000
    table = ps.TableConfig(num_rows, 16, ps.Constant(1.0), ps.SGD(0.5), name="t")
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), threads=4)
    ids, delays = np.arange(num_rows), np.random.default_rng(0).uniform(0.0005, 0.01, 60)

    def look_up_until_interrupted(delay):
        signal.setitimer(signal.ITIMER_REAL, delay)
        while True:
            engine.lookup("t", ids[::-1])

    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for delay in delays:
            with pytest.raises(KeyboardInterrupt):
                look_up_until_interrupted(delay)
            engine.apply({"t": (ids[-8:], np.zeros((8, 16), np.float32))})
            assert (engine.lookup("t", ids) == 1.0).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


class FailingTeam:
    """A team that does the first task only, and raises ``error`` if it is set."""

    threads = 4
    error = None

    def run(self, tasks):
        tasks[0]()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_step_is_applied_whole_if_the_threads_fail(error, mesh_of):
    rule, team = UpdateRule("adam", 2, ADAM.hyper, non_lazy=True), FailingTeam()
    expected, table = (host_table(mesh_of, rule, 9000, 4, devices=3, team=each) for each in (TEAM, team))
    ids, grads = some_rows(0, 6000, 9000, 4)
    expected.apply(ids, grads, 0.1)
    team.error = error
    with suppress(KeyboardInterrupt):
        table.apply(ids, grads, 0.1)
    team.error = None
    assert [bits(part) for part in parts_of(table)] == [bits(part) for part in parts_of(expected)]
