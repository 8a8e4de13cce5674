"""Limits of contributors: a frame whose norm is unusual for its contributor is scaled down, or left out."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from cli import error_line, outcome
from limits import HANG_S
from services import Process, free_port

import penstock as ps
from penstock.contrib.passes.multi_pass import MultiPass, PassOptions
from penstock.core.frame_limits import WINDOW

ROWS, DIM, WORKERS, STEPS = 30, 4, 8, 112
NAMES = [f"w{worker}" for worker in range(WORKERS)]
POISONED = "w5"
TIMES_A_MILLION, WITH_NANS = {101, 102, 107}, {104, 105}
QUARANTINE = ps.Limit(contributor_norm=10.0, action="quarantine")
KINDS = {
    "device": {},
    "host": {"placement": ps.Placement("host")},
    "cached": {"placement": ps.Placement("cached", device_bytes=500)},
    "dynamic": {"dynamic": ps.Dynamic()},
    "bfloat16": {"dtype": "bfloat16"},
}
GATES = {"num_required": {"num_required": WORKERS}, "rounds": {"workers": NAMES}}


def config_of(limit=QUARANTINE, optimizer=None, **more):
    word = ps.TableConfig(ROWS, DIM, name="word", **more)
    user = ps.TableConfig(ROWS, 3, ps.Constant(0.0), name="user")
    return ps.EmbeddingConfig.from_tables([word, user], optimizer or ps.Adagrad(0.1), limit=limit)


def gradients(step, worker):
    """By table: ids and gradients, of a norm that changes slowly, except those of the poisoned contributor."""
    rng, frame = np.random.default_rng([step, worker]), {}
    for name, dim in (("word", DIM), ("user", 3)):
        grads = (rng.normal(size=(3, dim)) * (1 + worker) * (1 + 0.01 * step)).astype(np.float32)
        if NAMES[worker] == POISONED and step in TIMES_A_MILLION:
            grads *= np.float32(1e6)
        if NAMES[worker] == POISONED and step in WITH_NANS:
            grads[1, 0] = math.nan
        frame[name] = rng.integers(0, ROWS, 3), grads
    return frame


def log_of(steps=range(STEPS), poisoned=True):
    """A log of all workers. poisoned : with the poisoned frames"""
    rows = []
    for step in steps:
        for worker, who in enumerate(NAMES):
            if not poisoned and who == POISONED and step in TIMES_A_MILLION | WITH_NANS:
                continue
            for name, (ids, grads) in gradients(step, worker).items():
                pairs = zip(ids.tolist(), grads.tolist(), strict=True)
                of_frame = {"table": name, "step": step, "contributor": who}
                rows += [{**of_frame, "id": row, "gradient": grad} for row, grad in pairs]
    return pa.Table.from_pylist(rows)


LOG, WITHOUT = log_of(), log_of(poisoned=False)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
def test_a_poisoned_contributor_leaves_no_trace(gate, more):
    config = config_of(**more)
    clean = ps.Engine(config_of(None, **more), **gate)
    clean.run(WITHOUT)
    for threads in (1, 8):
        engine = ps.Engine(config, threads=threads, **gate)
        report = engine.run(LOG, on_bad_row="drop")
        assert report.limited == {POISONED: len(TIMES_A_MILLION | WITH_NANS)}
        assert report.dropped == {"gradient_not_finite": 4, "norm_limit": 6 * 3 + 4 * 2}
        assert report.pending == clean.gate.num_accumulated
        assert engine.state_hash() == clean.state_hash()


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("action", ["clip", "quarantine"])
def test_a_resumed_run_is_the_same_wherever_it_stopped(tmp_path, gate, action):
    config, whole = config_of(ps.Limit(10.0, action)), {}
    engine = ps.Engine(config, **gate)
    engine.run(LOG, on_bad_row="drop", checkpoint=tmp_path / "whole")
    whole = ps.Engine.restore(tmp_path / "whole")
    assert whole.core.limits.get_state() == engine.core.limits.get_state()
    for stop in (101 * WORKERS + 6, 104 * WORKERS + 3, 108 * WORKERS):
        folder = tmp_path / str(stop)
        ps.Engine(config, **gate).run(LOG, on_bad_row="drop", limit=stop, checkpoint=folder, every=10)
        resumed = ps.Engine.restore(folder)
        resumed.run(LOG, on_bad_row="drop", checkpoint=folder, resume=True)
        assert resumed.state_hash() == engine.state_hash()
        assert resumed.core.limits.get_state() == engine.core.limits.get_state()
        totals = resumed.session.ledger.totals
        assert (totals.limited, totals.dropped) == (
            whole.session.ledger.totals.limited,
            whole.session.ledger.totals.dropped,
        )


def test_a_service_that_is_killed_judges_as_an_unbroken_run(tmp_path):
    config_of().save(tmp_path / "tables.pbtxt")
    uri, clean = f"grpc://127.0.0.1:{free_port()}", ps.Engine(config_of(None), num_required=WORKERS)
    clean.run(WITHOUT)
    words = [tmp_path / "tables.pbtxt", "--num-required", WORKERS, "--on-bad-row", "drop", "--listen", uri]
    words += ["--checkpoint", tmp_path / "run", "--every", 5, "--resume"]
    service, frames = Process(*words), [log_of([step]) for step in range(STEPS)]
    with ps.connect(uri, patience_s=HANG_S) as client, client.producer("log") as producer:
        for step, frame in enumerate(frames):
            if step in (60, 103, 106):  # with the norms of too few frames, and before, and between, what it leaves out
                service.process.kill()
                service.process.communicate()
                service = Process(*words)
            for who in NAMES:
                if (rows := frame.filter(pc.field("contributor") == who)).num_rows:
                    producer.send(rows)
    service.process.terminate()
    service.process.communicate(timeout=HANG_S)
    assert ps.Engine.restore(tmp_path / "run").state_hash() == clean.state_hash()


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_validate_says_what_a_replay_does(tmp_path, capsys, gate):
    config, log = tmp_path / "config.pbtxt", tmp_path / "log.parquet"
    table = ps.TableConfig(ROWS, DIM, name="word", optimizer=ps.SGD(0.1))
    ps.EmbeddingConfig.from_tables([table], limit=QUARANTINE, **gate).save(config)
    pq.write_table(LOG.filter(pc.equal(LOG["table"], "word")), log)
    words = config, log, "--on-bad-row", "drop"
    (_, replayed, _), (_, validated, _) = (outcome(capsys, command, *words) for command in ("replay", "validate"))
    assert validated["steps"] == replayed["steps"] == STEPS - ("num_required" in gate)
    (source,) = validated["sources"]
    assert source["bad_rows"] == replayed["dropped"] == {"gradient_not_finite": 2, "norm_limit": 13}


def engine_of(limit, **options):
    table = ps.TableConfig(4, 2, ps.Constant(0.0), ps.SGD(1.0), name="t")
    return ps.Engine(ps.EmbeddingConfig.from_tables([table], limit=limit), **options)


def push(engine, norm, who="a", times=1):
    for _ in range(times):
        engine.apply({"t": ([1], [[-0.6 * norm, -0.8 * norm]])}, contributor=who)


def moved(engine, norm, who="a"):
    """How far a row moves by a frame of a norm."""
    before = engine.lookup("t", [1])
    push(engine, norm, who)
    return float(np.linalg.norm(engine.lookup("t", [1]) - before))


@pytest.mark.parametrize(("action", "expected"), [("clip", 20.0), ("quarantine", 0.0)])
def test_the_101st_frame_of_a_contributor_is_the_first_that_is_judged(action, expected):
    engine = engine_of(ps.Limit(10.0, action))
    push(engine, 2.0, times=WINDOW - 1)
    assert moved(engine, 500.0) == pytest.approx(500.0, rel=1e-5)
    assert moved(engine, 500.0) == pytest.approx(expected, rel=1e-4)
    assert moved(engine, 500.0, "b") == pytest.approx(500.0, rel=1e-5)  # whose frames are others
    assert moved(engine, 19.9) == pytest.approx(19.9, rel=1e-4)
    assert engine.core.counters.limited == {"a": 1}


def test_the_median_is_that_of_the_last_frames_that_were_applied():
    engine = engine_of(ps.Limit(2.0, "quarantine"))
    push(engine, 1.0, times=WINDOW)
    push(engine, 3.0, times=WINDOW)  # each is left out: they never become usual
    assert engine.global_step == WINDOW
    assert engine.core.counters.dropped == {"norm_limit": WINDOW}
    push(engine, 1.5, times=WINDOW // 2 + 1)
    assert moved(engine, 2.9) == pytest.approx(2.9, rel=1e-4)
    assert moved(engine, 3.1) == 0.0


def test_what_is_clipped_counts_with_the_norm_that_it_was_clipped_to():
    engine = engine_of(ps.Limit(2.0, "clip"))
    push(engine, 1.0, times=WINDOW)
    push(engine, 100.0, times=WINDOW // 2 + 1)
    assert moved(engine, 100.0) == pytest.approx(4.0, rel=1e-4)


def test_frames_of_zeros_and_without_rows_are_no_measure():
    engine = engine_of(ps.Limit(2.0, "quarantine"))
    push(engine, 0.0, times=2 * WINDOW)
    assert moved(engine, 7.0) == pytest.approx(7.0)
    assert engine.core.counters.limited == {}


def test_a_frame_that_is_left_out_opens_no_gate_and_passes_a_round():
    gate, rounds = (
        engine_of(ps.Limit(2.0, "quarantine"), num_required=2),
        engine_of(ps.Limit(2.0, "quarantine"), workers=["a", "b"]),
    )
    for _ in range(WINDOW):
        for engine in (gate, rounds):
            push(engine, 1.0, "a")
            push(engine, 1.0, "b")
    for engine in (gate, rounds):
        push(engine, 9.0, "a")
        push(engine, 1.0, "b")
    assert (gate.global_step, gate.gate.num_accumulated) == (WINDOW, 1)
    assert (rounds.global_step, rounds.gate.num_accumulated) == (WINDOW + 1, 0)


def test_a_gradient_that_is_not_finite_is_an_error_where_bad_rows_are():
    engine = engine_of(ps.Limit(2.0, "quarantine"))
    push(engine, 1.0, times=WINDOW)
    before = engine.state_hash()
    with pytest.raises(ps.InputError, match="finite"):
        push(engine, math.nan)
    assert engine.state_hash() == before


def test_a_report_has_the_norms_of_tables_and_contributors():
    engine, count = engine_of(ps.Limit(2.0), num_required=2, reduction="sum"), 5
    steps, who = np.arange(2 * count) // 2, ["a", "b"] * count
    rows = {"step": steps, "contributor": who, "id": [1] * 2 * count, "gradient": [[3.0, 4.0], [6.0, 8.0]] * count}
    report = engine.run(pa.table(rows))
    assert report.contributor_norms == {"a": 5.0, "b": 10.0}
    assert report.gradient_norms == report.to_dict()["gradient_norms"] == {"t": 15.0}
    assert list(report.update_norms) == ["t"]
    assert report.update_norms["t"] > 0
    assert engine_of(None).run(pa.table(rows)).to_dict()["gradient_norms"] == {}


def test_memory_is_bounded_for_any_number_of_contributors():
    engine = engine_of(ps.Limit(2.0))
    for who in range(1500):
        push(engine, 1.0, who)
    state = engine.core.limits.get_state()
    assert len(state) == 1001
    assert state[-1][0] == "others"
    push(engine, 1.0, "others", 300)
    assert max(len(norms) for _, norms in engine.core.limits.get_state()) < 1100  # 100 floats in base 64


def test_a_rollback_keeps_the_norms(tmp_path):
    engine = engine_of(ps.Limit(2.0, "quarantine"))
    engine.save(tmp_path)
    push(engine, 1.0, times=WINDOW)
    engine.rollback(0)
    assert moved(engine, 9.0) == 0.0
    engine.save(tmp_path)
    assert moved(ps.Engine.restore(tmp_path), 9.0) == 0.0


def test_a_file_has_it(tmp_path):
    for action in ("clip", "quarantine"):
        config_of(ps.Limit(10.0, action)).save(tmp_path / "config.pbtxt")
        assert ps.EmbeddingConfig.load(tmp_path / "config.pbtxt").limit == ps.Limit(10.0, action)


@pytest.mark.parametrize("norm", [0, 0.5, -1.0, math.nan, math.inf, True, "1", None])
def test_a_norm_is_a_finite_number_of_at_least_1(norm):
    with pytest.raises(
        ps.ConfigError, match=r"^limit: contributor_norm is .*; it must be a finite number of at least 1$"
    ):
        ps.Limit(norm)


def test_an_action_is_one_of_two():
    with pytest.raises(ps.ConfigError, match="limit: action must be one of clip, quarantine, got 'drop'"):
        ps.Limit(2.0, "drop")
    with pytest.raises(ps.ConfigError, match=r"limit must be a Limit, got 2\.0"):
        config_of(2.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("contributor_norm: nan", "limit: contributor_norm is nan; it must be a finite number of at least 1"),
        ("action: CLIP", "limit: has no contributor_norm; give a number of at least 1"),
        ("contributor_norm: 2 action: 7", "limit: action is 7; use CLIP or QUARANTINE"),
    ],
)
def test_a_file_with_a_bad_limit_is_one_line(tmp_path, capsys, text, problem):
    path = tmp_path / "config.pbtxt"
    config_of(None).save(path)
    start = "tpu_embedding_configuration {"
    path.write_text(path.read_text().replace(start, f"limit {{ {text} }}\n{start}", 1))
    assert problem in error_line(capsys, 4, "replay", path, tmp_path / "none.arrows")


def test_what_has_a_part_of_the_gradients_refuses_it(tmp_path):
    with pytest.raises(ps.ConfigError, match="limit: an engine with a share of the rows knows no norms of gradients"):
        ps.Engine(config_of(), share=(0, 2))
    with pytest.raises(ps.ConfigError, match="limit: a replay in passes knows no norms of gradients"):
        MultiPass(config_of(), ["log.arrows"], None, PassOptions(checkpoint=tmp_path, passes=2))
