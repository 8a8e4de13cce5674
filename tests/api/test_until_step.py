"""Tables that are frozen up to a step: from then on they are trained, with new slots, as after a restart."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli import error_line, outcome

import penstock as ps

ROWS, DIM, UNTIL = 40, 4, 3
PLACEMENTS = {
    "host": {"placement": ps.Placement("host")},
    "cached": {"placement": ps.Placement("cached", device_bytes=200)},
    "dynamic": {"dynamic": ps.Dynamic()},
    "bfloat16": {"dtype": "bfloat16"},
}


def config_of(optimizer=None, *, trainable=False, until_step=UNTIL, **more):
    until = {} if trainable else {"until_step": until_step}
    word = ps.TableConfig(
        ROWS, DIM, name="word", optimizer=optimizer or ps.Adam(0.1), trainable=trainable, **until, **more
    )
    return ps.EmbeddingConfig.from_tables([word, ps.TableConfig(ROWS, DIM, name="user", optimizer=ps.Adagrad(0.1))])


def frame(step, names=("word", "user")):
    frame = {}
    for name in names:
        rng = np.random.default_rng([step, *name.encode()])
        frame[name] = rng.integers(0, ROWS, 6), rng.normal(size=(6, DIM)).astype(np.float32)
    return frame


def log_of(steps):
    rows = []
    for step in steps:
        for name, (ids, grads) in frame(step).items():
            pairs = zip(ids.tolist(), grads.tolist(), strict=True)
            rows += [{"table": name, "step": step, "id": row, "gradient": grad} for row, grad in pairs]
    return pa.Table.from_pylist(rows)


def restarted(folder, optimizer=None, steps=6, **more):
    """An engine whose table was frozen, and trained after a restart."""
    engine = ps.Engine(config_of(optimizer, until_step=None, **more))
    for step in range(UNTIL):
        engine.apply(frame(step))
    engine.save(folder)
    engine = ps.Engine.restore(folder, config=config_of(optimizer, trainable=True, **more), reset_slots=["word"])
    for step in range(UNTIL, steps):
        engine.apply(frame(step))
    return engine


@pytest.mark.parametrize("more", [{}, *PLACEMENTS.values()], ids=["device", *PLACEMENTS])
@pytest.mark.parametrize("optimizer", [ps.Adam(0.1), ps.FTRL(0.1), ps.SGD(0.1)], ids=lambda each: type(each).__name__)
def test_it_is_the_same_as_a_restart_with_new_slots(tmp_path, optimizer, more):
    engine = ps.Engine(config_of(optimizer, **more))
    before = engine.lookup("word", range(ROWS))
    for step in range(6):
        if step == UNTIL:
            np.testing.assert_array_equal(engine.lookup("word", range(ROWS)), before)
        engine.apply(frame(step))
    assert engine.state_hash() == restarted(tmp_path, optimizer, **more).state_hash()
    assert (engine.lookup("word", frame(5)["word"][0]) != before[frame(5)["word"][0]]).any()


def test_an_optimizer_that_changes_all_rows_does_from_then_on(tmp_path):
    optimizer = ps.Adam(0.1, lazy_adam=False)
    engine = ps.Engine(config_of(optimizer))
    for step in range(6):
        engine.apply(frame(step, ["user"] if step == UNTIL - 1 else ["word", "user"]))
    assert engine.state_hash() == restarted(tmp_path, optimizer).state_hash()


def test_slots_are_there_from_the_step_on_at_their_start():
    optimizer = ps.Adagrad(0.1, initial_accumulator_value=0.25)
    engine = ps.Engine(config_of(optimizer))
    num_bytes = [sum(array.nbytes for array in arrays(engine))]
    for step in range(UNTIL):
        assert engine.slots("word") == {}
        engine.apply(frame(step))
        num_bytes.append(sum(array.nbytes for array in arrays(engine)))
    np.testing.assert_array_equal(np.asarray(engine.slots("word")["accumulators"]), np.float32(0.25))
    assert num_bytes == [num_bytes[0]] * UNTIL + [2 * num_bytes[0]]


def arrays(engine):
    return engine.core.tables.table("word").backend.arrays


def test_a_hash_before_the_step_is_that_of_a_frozen_table():
    until, frozen = ps.Engine(config_of()), ps.Engine(config_of(until_step=None))
    for step in range(UNTIL - 1):
        for engine in (until, frozen):
            engine.apply(frame(step))
    assert until.state_hash() == frozen.state_hash()


@pytest.mark.parametrize("stop", range(6))
def test_a_resumed_run_is_the_same_wherever_it_stopped(tmp_path, stop):
    whole = ps.Engine(config_of())
    report = whole.run(log_of(range(6)))
    assert report.dropped == {"frozen:word": 6 * UNTIL}
    first = ps.Engine(config_of())
    first.run(log_of(range(6)), limit=stop, checkpoint=tmp_path, every=1)
    again = ps.Engine.restore(tmp_path)
    assert again.state_hash() == first.state_hash()
    again.run(log_of(range(6)), checkpoint=tmp_path, every=1, resume=True)
    assert again.state_hash() == whole.state_hash()
    assert ps.Engine.restore(tmp_path).state_hash() == whole.state_hash()
    assert ps.Engine.restore(tmp_path, config=config_of()).state_hash() == whole.state_hash()


def test_frames_of_another_table_alone_stop_at_the_step(tmp_path):
    rows = {"step": range(20), "id": range(20), "gradient": [[1.0] * DIM] * 20}
    log = pa.table({"table": ["user"] * 20, **rows})
    at_once, one_by_one = ps.Engine(config_of()), ps.Engine(config_of())
    at_once.run(log)
    for step in range(20):
        one_by_one.run(log.slice(step, 1))
    assert at_once.state_hash() == one_by_one.state_hash()
    assert "m" in str(at_once.slots("word").keys())
    (change,) = at_once.session.ledger.changes
    assert change.step == UNTIL


@pytest.mark.parametrize("required", [1, 2])
def test_a_gate_that_waits_for_several_frames_opens_with_those_of_its_step(required):
    engine = ps.Engine(config_of(), num_required=required)
    for step in range(UNTIL):
        for worker in range(required):
            engine.apply(frame(10 * step + worker), local_step=step, contributor=worker)
    before = engine.lookup("word", range(ROWS))
    engine.apply(frame(30), local_step=UNTIL)
    if required == 2:
        np.testing.assert_array_equal(engine.lookup("word", range(ROWS)), before)
        engine.apply(frame(31, ["user"]), local_step=UNTIL)
    assert (engine.lookup("word", frame(30)["word"][0]) != before[frame(30)["word"][0]]).any()


def test_in_rounds_the_turn_of_a_frame_decides(tmp_path):
    hashes = []
    in_order = [(step, worker) for step in range(6) for worker in range(2)]
    early = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (3, 1), (2, 0), (3, 0), (4, 1), (5, 1), (4, 0), (5, 0)]
    for order in (in_order, early):
        engine = ps.Engine(config_of(), workers=2)
        for number, (step, worker) in enumerate(order):
            engine.apply(frame(10 * step + worker), local_step=step, contributor=worker)
            if number == 5:  # frames wait for their turn
                engine.save(tmp_path / str(len(hashes)))
                engine = ps.Engine.restore(tmp_path / str(len(hashes)))
        assert engine.global_step == 6
        hashes.append(engine.state_hash())
    assert hashes[0] == hashes[1]


def test_gradients_are_refused_up_to_the_step():
    engine = ps.Engine(config_of(on_gradient="refuse"))
    with pytest.raises(ps.InputError, match="6 gradients for table 'word', which is frozen and refuses them"):
        engine.apply(frame(0))
    for step in range(UNTIL):
        engine.apply(frame(step, ["user"]))
    engine.apply(frame(UNTIL))
    assert engine.global_step == UNTIL + 1


def test_deltas_have_the_table_and_its_slots_from_the_step_on():
    config = config_of(ps.Adagrad(0.1))
    deltas = pa.Table.from_batches(list(ps.Engine(config).stage(log_of(range(6)), slots=["accumulators"])))
    word = deltas.filter(pa.compute.equal(deltas["table"].cast(pa.utf8()), "word"))
    assert set(word["step"].to_pylist()) == {4, 5, 6}
    assert word["accumulators"].null_count == 0
    engine = ps.Engine(config)
    deltas = engine.stage(log_of(range(2)), slots=True)
    engine.load_parameters("word", np.ones((1, DIM), np.float32), ids=[7])
    loaded = deltas.read_all().filter(pa.compute.field("id") == 7).to_pylist()
    assert [row["accumulators"] for row in loaded if row["table"] == "word"] == [None]


def test_readers_without_the_lock_read_the_rows_before_and_after():
    engine = ps.Engine(config_of(dynamic=ps.Dynamic()))
    for step in range(6):
        rows = engine.reads.lookup({"word": range(ROWS), "user": range(ROWS)}, consistent=True)
        assert rows.version.step == step
        for name in ("word", "user"):
            np.testing.assert_array_equal(rows[name], engine.lookup(name, range(ROWS)))
        engine.apply(frame(step))


# ---- the event


def test_the_step_is_a_numbered_change_in_commits(tmp_path, capsys):
    engine = ps.Engine(config_of())
    engine.run(log_of(range(5)), checkpoint=tmp_path / "a", every=1)
    ps.Engine(config_of()).run(log_of(range(2)), checkpoint=tmp_path / "b")
    code, _, text = outcome(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "change 1 of the tables, at step 3: 'word' trained, with new slots" in text
    assert [str(change) for change in ps.Engine.restore(tmp_path / "a").session.ledger.changes] == [
        "change 1 of the tables, at step 3: 'word' trained, with new slots"
    ]


def test_a_commit_in_progress_at_the_step_has_the_rows_before_it(tmp_path):
    engine, whole = ps.Engine(config_of()), ps.Engine(config_of())
    engine.run(log_of(range(UNTIL)), checkpoint=tmp_path, every=1, keep=10)
    engine.run(log_of(range(6)), checkpoint=tmp_path, every=1, keep=10, resume=True)
    for step in range(1, 7):
        whole.apply(frame(step - 1))
        with_step = f"{tmp_path}@{step}"
        if step in {commit["step"] for commit in commits(tmp_path)}:
            assert ps.Engine.restore(with_step).state_hash() == whole.state_hash()


def test_commits_have_room_for_the_wider_rows(tmp_path):
    word = ps.TableConfig(1, DIM, name="word", optimizer=ps.Adam(0.1), trainable=False, until_step=2)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([word]))
    log = pa.table({"step": range(4), "id": [0] * 4, "gradient": [[1.0] * DIM] * 4})
    engine.run(log, checkpoint=tmp_path, every=1)
    assert ps.Engine.restore(tmp_path).state_hash() == engine.state_hash()


def commits(folder):
    from penstock.checkpoint.store import Folder

    return [{"step": Folder(folder).load(number).step} for number in Folder(folder).numbers()]


def test_a_rollback_to_before_the_step_is_refused_in_an_engine_and_starts_new_slots_in_a_folder(tmp_path, capsys):
    engine = ps.Engine(config_of())
    engine.run(log_of(range(2)), checkpoint=tmp_path)
    engine.tag("two")
    rows = engine.lookup("word", range(ROWS))
    engine.run(log_of(range(5)), checkpoint=tmp_path, resume=True)
    before = engine.state_hash()
    with pytest.raises(ps.StateError, match="table 'word' is frozen there and trained now") as raised:
        engine.rollback("two")
    assert "\n" not in str(raised.value)
    assert engine.state_hash() == before
    assert "table 'word'" in error_line(capsys, 5, "rollback", tmp_path, "--to", "two")
    branch = tmp_path.with_name("branch")
    outcome(capsys, "branch", tmp_path, branch, "--at", "two")
    again = ps.Engine.restore(branch)
    assert again.slots("word") == {}
    np.testing.assert_array_equal(again.lookup("word", range(ROWS)), rows)
    again.run(log_of(range(5)), checkpoint=branch, resume=True)
    assert again.state_hash() == before


def test_a_rollback_may_be_the_step(tmp_path):
    engine = ps.Engine(config_of())
    engine.run(log_of(range(1)), checkpoint=tmp_path)
    engine.tag("one")
    rows = {name: engine.lookup(name, range(ROWS)) for name in ("word", "user")}
    engine.run(log_of(range(2)), checkpoint=tmp_path, resume=True)
    engine.rollback("one")
    assert engine.global_step == UNTIL
    assert engine.slots("word").keys() == {"momenta", "velocities"}
    engine.save(tmp_path)
    again = ps.Engine.restore(tmp_path)
    assert again.state_hash() == engine.state_hash()
    for name, before in rows.items():
        np.testing.assert_array_equal(again.lookup(name, range(ROWS)), before)
    for each in (engine, again):
        each.apply(frame(7))
    assert again.state_hash() == engine.state_hash()


# ---- what cannot be


def test_rows_that_other_processes_read_are_refused(tmp_path):
    with pytest.raises(
        ps.ConfigError, match="table 'word' has until_step 3, which an engine whose rows other"
    ) as raised:
        ps.Engine(config_of(), shared=tmp_path / "shared")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "shared").exists()


def test_a_share_is_refused():
    with pytest.raises(ps.ConfigError, match="has until_step 3, which an engine with a share of the rows does not"):
        ps.Engine(config_of(), share=(0, 2))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"until_step": 5}, "until_step is of a frozen table; set trainable=False, or remove it"),
        ({"trainable": False, "until_step": 0}, "until_step must be a step, at least 1, or None, got 0"),
        ({"trainable": False, "until_step": 2.0}, "until_step must be a step, at least 1, or None, got 2.0"),
    ],
)
def test_a_wrong_setting_is_one_line(arguments, problem):
    with pytest.raises(ps.ConfigError) as raised:
        ps.TableConfig(ROWS, DIM, **arguments)
    assert str(raised.value) == problem


def test_a_table_that_is_trained_later_needs_an_optimizer():
    with pytest.raises(ps.ConfigError, match="table 'word': no optimizer"):
        ps.EmbeddingConfig.from_tables([ps.TableConfig(8, 2, name="word", trainable=False, until_step=1)])


def test_a_later_step_in_the_configuration_is_not_taken_for_a_table_with_slots(tmp_path):
    engine = ps.Engine(config_of())
    engine.run(log_of(range(5)), checkpoint=tmp_path)
    with pytest.raises(
        ps.StateError, match=r"table 'word' is trained with slots .* in the checkpoint and frozen in the"
    ):
        ps.Engine.restore(tmp_path, config=config_of(until_step=10))
    assert ps.Engine.restore(tmp_path, config=config_of(until_step=2)).state_hash() == engine.state_hash()
    assert ps.Engine.restore(tmp_path, config=config_of(trainable=True)).state_hash() == engine.state_hash()


# ---- the commands


def files(tmp_path, config, steps=5):
    config.save(tmp_path / "tables.pbtxt")
    pq.write_table(log_of(range(steps)), tmp_path / "log.parquet")
    return tmp_path / "tables.pbtxt", tmp_path / "log.parquet"


def test_the_commands_know_the_step(tmp_path, capsys):
    config, log = files(tmp_path, config_of(dynamic=ps.Dynamic()))
    assert "until_step: 3" in config.read_text()
    code, result, _ = outcome(capsys, "validate", config, log)
    assert (code, result["sources"][0]["dropped"]) == (0, {"frozen:word": 18})
    assert result["memory"]["word"]["slots"] == ROWS * DIM * 8
    code, result, _ = outcome(capsys, "replay", config, log, "--out", tmp_path / "out")
    assert (code, result["dropped"]) == (0, {"frozen:word": 18})
    num_keys = len(set(frame(3)["word"][0]) | set(frame(4)["word"][0]))
    table = pq.read_table(tmp_path / "out/word.parquet")
    assert (table.num_rows, table.column_names) == (num_keys, ["id", "row", "momenta", "velocities"])
    code, result, _ = outcome(capsys, "plan", config, log)
    assert (code, result["choices"][0]["tables"]["word"]["keys"]) == (0, num_keys)
    row = int(frame(4)["word"][0][0])
    code, result, _ = outcome(capsys, "blame", config, log, "--table", "word", "--id", row)
    assert {each["step"] for each in result["frames"]} <= {3, 4}
