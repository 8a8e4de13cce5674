"""The Engine from Python: frames, the gate, learning rates, parameters in and out."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
from batches import batch
from engines import column, engine_of, frame, zeroed

import penstock as ps
from penstock.model.frames import Frame, Rows
from penstock.pyx.frame_accumulate import Intake


def test_repr_of_an_engine_names_tables_step_and_devices(mesh_of):
    engine = engine_of(tables=("t", "u"), mesh=mesh_of(3))
    engine.apply({"u": frame([1])})
    assert repr(engine) == "Engine(tables: t, u; step 1; 3 cpu)"


def test_an_engine_is_not_pickled_or_copied_but_saved():
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"cannot pickle or copy Engine\(tables: t; .*Engine.save"):
            copied(engine_of())


# ---- frames and the gate


def test_repeated_ids_are_summed_and_updated_once():
    engine = zeroed(engine_of(ps.Adagrad(1.0, initial_accumulator_value=0.5)))
    engine.apply({"t": frame([3, 3, 3])})
    assert engine.retrieve_parameters("t")["accumulators"][3].tolist() == [9.5, 9.5]  # (1+1+1)², not 1+1+1
    assert engine.retrieve_parameters("t")["accumulators"][4].tolist() == [0.5, 0.5]


def test_mean_divides_by_the_frames_that_held_the_row_and_sum_does_not():
    for reduction, wanted in (("mean", [-1.5, -4.0]), ("sum", [-3.0, -4.0])):
        engine = zeroed(engine_of(num_required=2, reduction=reduction))
        engine.apply({"t": frame([0, 0], 0.5)})
        engine.apply({"t": (np.array([0, 1]), np.array([[2, 2], [4, 4]], np.float32))})
        assert column(engine)[:2] == wanted


def test_a_frame_without_rows_counts_for_the_gate():
    engine = zeroed(engine_of(num_required=2, tables=("t", "u")))
    engine.apply({})
    engine.apply({"u": frame([1])})
    assert (engine.global_step, column(engine, "u")[1]) == (1, -1.0)


def test_all_tables_share_one_gate():
    engine = zeroed(engine_of(num_required=2, tables=("t", "u")))
    engine.apply({"t": frame([1])})
    assert (engine.gate.num_accumulated, column(engine)[1]) == (1, 0.0)
    engine.apply({"u": frame([1])})
    assert (engine.gate.num_accumulated, column(engine)[1], column(engine, "u")[1]) == (0, -1.0, -1.0)


def test_a_stale_frame_is_dropped_whole_and_counted_and_one_without_a_step_never_is():
    engine = zeroed(engine_of())
    assert engine.apply({"t": frame([0])}, local_step=0)
    assert not engine.apply({"t": frame([0])}, local_step=0)
    assert engine.apply({"t": frame([0])}, local_step=99)  # the future is accepted
    assert engine.apply({"t": frame([0])})
    assert (column(engine)[0], engine.gate.stale.total, engine.global_step) == (-3.0, 1, 3)


def test_accumulated_frames_stay_for_the_next_run():
    engine = zeroed(engine_of(num_required=3))
    first = engine.run([batch([0]), batch([0])])
    assert (first.steps, first.pending, column(engine)[0]) == (0, 2, 0.0)
    second = engine.run([batch([0])])
    assert (second.steps, second.pending, column(engine)[0]) == (1, 0, -3.0 / 3)


def test_flush_opens_the_gate_once_more_and_only_if_it_holds_something():
    engine = zeroed(engine_of(num_required=3))
    assert engine.run([batch([0])], flush=True).steps == 1
    assert engine.run([], flush=True).steps == 0
    assert not engine.flush()
    engine.apply({"t": frame([1])})
    assert engine.flush()
    assert (engine.global_step, column(engine)[:2]) == (2, [-1.0, -1.0])


def test_limit_counts_frames_stale_ones_included():
    engine = zeroed(engine_of())
    report = engine.run([batch([0], step=s) for s in (0, 1, 0, 2)], limit=3)
    assert (report.frames, report.stale, report.steps) == (3, 1, 2)
    assert engine.run([batch([0])], limit=0).frames == 0


def test_accumulation_off_applies_every_frame_by_itself_undivided():
    engine = zeroed(engine_of(ps.Adagrad(1.0, 1.0, use_gradient_accumulation=False), num_required=2))
    engine.apply({"t": frame([0, 0], 1.0)})
    engine.apply({"t": frame([0], 2.0)})
    # 1 + 2² after the first frame, + 2² after the second; merged it would be 1 + ((1+1+2)/2)².
    assert engine.retrieve_parameters("t")["accumulators"][0].tolist() == [9.0, 9.0]
    assert engine.global_step == 1


def test_the_report_counts_rows_tables_and_distinct_ids():
    engine = engine_of(tables=("t", "u"), num_required=2)
    report = engine.run([batch([0, 0, 1], table="t"), batch([2, 3], table="u"), batch([1, 7], table="t")])
    assert (report.rows, report.frames, report.steps, report.pending) == (7, 3, 1, 1)
    assert report.tables == {"t": ps.TableReport(5, 3), "u": ps.TableReport(2, 2)}
    assert report.dropped == {}
    assert not report.verified
    assert report.held_bytes > 0
    again = engine.run([batch([5], table="t")])
    assert (again.rows, again.tables["t"].rows) == (1, 1)


def test_ids_held_from_an_earlier_run_are_not_counted_again():
    engine = engine_of(num_required=3)
    engine.run([batch([0, 1])])
    assert engine.run([batch([1, 2])]).tables["t"] == ps.TableReport(2, 2)
    assert engine.run([], flush=True).tables["t"] == ps.TableReport(0, 0)


def test_gate_settings_of_the_configuration_hold_unless_the_call_says_otherwise():
    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(10, 2)], ps.SGD(1.0), num_required=4, reduction="sum")
    engine = ps.Engine(config)
    assert (engine.gate.num_required, engine.reduction) == (4, "sum")
    engine = ps.Engine(config, num_required=2, reduction="mean")
    assert (engine.gate.num_required, engine.reduction) == (2, "mean")


# ---- nothing half applied


@pytest.mark.promise("A bad row leaves nothing of its frame behind")
def test_a_bad_row_late_in_a_frame_leaves_nothing_of_the_frame_behind():
    good, bad = [batch([0], step=0), batch([1], step=1)], [batch([2] * 50, step=2), batch([99], step=2)]
    engine, other = (zeroed(engine_of(num_required=3)) for _ in range(2))
    with pytest.raises(ps.InputError, match="batch 3, row 0, column 'id': expected 0 <= id < 10") as caught:
        engine.run([*good, *bad])
    assert (caught.value.batch, caught.value.row, caught.value.column) == (3, 0, "id")
    other.run(good)
    assert engine.gate.num_accumulated == other.gate.num_accumulated == 2
    for e in (engine, other):
        e.run([batch([3], step=2)])
    assert engine.state_hash() == other.state_hash()


def test_apply_refuses_a_frame_whole():
    engine = zeroed(engine_of(tables=("t", "u")))
    before = engine.state_hash()
    for bad in ([10], [-1]):
        with pytest.raises(ps.InputError, match="expected 0 <= id < 10"):
            engine.apply({"t": frame([1]), "u": frame(bad)})
    with pytest.raises(ps.InputError, match="expected 2 floats"):
        engine.apply({"t": frame([1], dim=3)})
    with pytest.raises(ps.InputError, match="finite"):
        engine.apply({"t": frame([1], np.nan)})
    with pytest.raises(ps.InputError, match=r"expected a table of the configuration \(t, u\), got 'v'.*unknown_table"):
        engine.apply({"v": frame([1])})
    assert (engine.state_hash(), engine.gate.num_accumulated) == (before, 0)


def test_an_engine_refuses_use_after_a_failed_step(monkeypatch):
    engine = zeroed(engine_of(tables=("t", "u")))
    monkeypatch.setattr(
        engine.core.tables._groups[0], "apply", lambda *a: (_ for _ in ()).throw(RuntimeError("device lost"))
    )
    with pytest.raises(RuntimeError, match="device lost"):
        engine.apply({"t": frame([1]), "u": frame([1])})
    for use in (
        lambda: engine.apply({"t": frame([1])}),
        engine.state_hash,
        lambda: engine.lookup("t", [1]),
        lambda: engine.write_tables("never"),
        lambda: engine.load_parameters("t", np.zeros((10, 2))),
    ):
        with pytest.raises(ps.StateError, match=r"failed half way \(RuntimeError: device lost\)"):
            use()


def test_inference_mode_refuses_updates():
    proto = engine_of().config.to_proto()
    proto.mode = 1
    engine = ps.Engine(ps.EmbeddingConfig.from_proto(proto))
    engine.gate.set_global_step(3)
    for local_step in (None, 0):  # a stale frame, too
        with pytest.raises(ps.ConfigError, match="INFERENCE"):
            engine.apply({"t": frame([1])}, local_step=local_step)
    assert engine.lookup("t", [1]).shape == (1, 2)


# ---- memory


@pytest.mark.parametrize("is_vacant", [True, False])
def test_the_arrays_of_a_refused_frame_are_released(is_vacant):
    engine = engine_of(num_required=2)
    if not is_vacant:
        engine.apply({"t": frame([1])})
    ids, gradients = frame([2, 3], np.nan)
    alive = weakref.ref(gradients)
    with pytest.raises(ps.InputError, match="finite"):
        engine.apply({"t": (ids, gradients)})
    del gradients
    gc.collect()  # the error's traceback
    assert alive() is None


def test_the_arrays_of_a_frame_that_was_only_checked_are_released():
    """As the processes of a mesh check theirs before a round."""
    ids, gradients = frame([2, 3])
    alive, pipeline = weakref.ref(gradients), engine_of().core.pipeline
    pipeline.check(Frame({"t": (Rows(ids, gradients),)}, 2))
    del gradients
    assert alive() is None


@pytest.mark.parametrize("table", ["a", "b"])
def test_a_frame_that_finds_no_memory_leaves_everything_as_it_was(table, monkeypatch):
    engine, other = (zeroed(engine_of(tables=("a", "b"), num_required=2)) for _ in range(2))
    engine.apply({"a": frame([1]), "b": frame([2, 3])})
    before, held = engine.state_hash(), engine.gate.get_state()

    class Scarce(Intake):
        def begin(self, accumulators, blocks, *rest):
            offset = accumulators.index(engine.core.pipeline.stores[table].accumulator)
            super().begin(accumulators[:offset], blocks[:offset], *rest)
            self.cancel()
            raise MemoryError("cannot allocate 4096 bytes for sums")

    with monkeypatch.context() as patch:
        patch.setattr(engine.core.pipeline, "_intake", Scarce())
        with pytest.raises(MemoryError):
            engine.apply({"a": frame([1, 4]), "b": frame([5])})
    assert (engine.state_hash(), engine.gate.get_state()) == (before, held)
    other.apply({"a": frame([1]), "b": frame([2, 3])})
    for item in (engine, other):
        item.apply({"a": frame([1, 4]), "b": frame([5])})
    assert (engine.global_step, engine.state_hash()) == (1, other.state_hash())


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_and_a_client_say_what_to_pass_to_another_process(copied):
    with pytest.raises(
        ps.UsageError, match=r"^cannot pickle or copy Engine.*: Engine.save writes it, Engine.restore reads"
    ):
        copied(engine_of())
    with pytest.raises(ps.UsageError, match=r"^cannot pickle or copy a Client: connect in the other process"):
        copied(ps.connect("grpc://127.0.0.1:8815"))
