"""Tables that are not trainable: no slots, no updates, no deltas. Their gradients are counted, or refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli import error_line, outcome

import penstock as ps

ROWS, DIM = 40, 4


def config_of(*, optimizer=None, on_gradient="drop", **frozen):
    frozen = {"trainable": False, "on_gradient": on_gradient, **frozen}
    word = ps.TableConfig(ROWS, DIM, name="word", optimizer=optimizer or ps.Adam(0.1), **frozen)
    return ps.EmbeddingConfig.from_tables([word, ps.TableConfig(ROWS, DIM, name="user", optimizer=ps.Adagrad(0.1))])


def frame(step, names=("word", "user")):
    frame = {}
    for name in names:
        rng = np.random.default_rng([step, *name.encode()])
        frame[name] = rng.integers(0, ROWS, 6), rng.normal(size=(6, DIM)).astype(np.float32)
    return frame


def log_of(steps):
    rows = []
    for step in range(steps):
        for name, (ids, grads) in frame(step).items():
            pairs = zip(ids.tolist(), grads.tolist(), strict=True)
            rows += [{"table": name, "step": step, "id": row, "gradient": grad} for row, grad in pairs]
    return pa.Table.from_pylist(rows)


def test_a_frozen_table_keeps_its_rows_and_the_others_train_as_without_it():
    engine, alone = ps.Engine(config_of()), ps.Engine(config_of())
    before = engine.lookup("word", range(ROWS))
    report = engine.run(log_of(5))
    for step in range(5):
        alone.apply(frame(step, ["user"]))
    np.testing.assert_array_equal(engine.lookup("word", range(ROWS)), before)
    np.testing.assert_array_equal(engine.lookup("user", range(ROWS)), alone.lookup("user", range(ROWS)))
    assert engine.state_hash() == alone.state_hash()
    assert report.dropped == {"frozen:word": 30}
    assert report.rows == 60
    assert report.steps == 5
    assert "dropped 30 rows, gradients of table 'word', which is frozen" in report.notes


def test_a_frozen_table_has_no_slots_and_no_bytes_for_them(tmp_path):
    def num_bytes(config, place):
        with_rows = ps.Engine(config, shared=tmp_path / place)
        assert with_rows.config.table("word").row_bytes == DIM * 4 * (1 + len(with_rows.slots("word")))
        return sum(file.stat().st_size for file in (tmp_path / place).glob("rows-*"))

    page = 4096  # to which files are rounded
    rows = 40 * page // (DIM * 4)
    word = [ps.TableConfig(rows, DIM, name="word", optimizer=ps.Adam(0.1), trainable=kind) for kind in (False, True)]
    frozen, trained = (num_bytes(ps.EmbeddingConfig.from_tables([each]), each.trainable.__repr__()) for each in word)
    assert trained - frozen == rows * DIM * 4 * 2


def test_a_step_has_no_delta_of_a_frozen_table():
    deltas = pa.Table.from_batches(list(ps.Engine(config_of()).stage(log_of(3))))
    assert set(deltas["table"].to_pylist()) == {"user"}
    assert set(deltas["step"].to_pylist()) == {1, 2, 3}


def test_a_frozen_table_may_refuse_gradients():
    engine = ps.Engine(config_of(on_gradient="refuse"))
    engine.apply(frame(0, ["user"]))
    before = engine.state_hash()
    with pytest.raises(ps.InputError, match="6 gradients for table 'word', which is frozen and refuses them") as raised:
        engine.apply(frame(1))
    assert "\n" not in str(raised.value)
    assert engine.state_hash() == before
    engine.apply({"user": frame(1)["user"], "word": (np.zeros(0, np.int64), np.zeros((0, DIM), np.float32))})
    assert engine.global_step == 2


@pytest.mark.parametrize(("column", "value"), [("id", ROWS), ("gradient", [np.nan] * DIM)])
def test_a_bad_row_of_a_frozen_table_is_bad(column, value):
    rows = log_of(1).to_pylist()
    rows[2] |= {column: value}
    assert rows[2]["table"] == "word"
    with pytest.raises(ps.InputError, match="row 2"):
        ps.Engine(config_of()).run(pa.Table.from_pylist(rows, log_of(1).schema))
    dropped = ps.Engine(config_of()).run(pa.Table.from_pylist(rows, log_of(1).schema), on_bad_row="drop").dropped
    assert dropped["frozen:word"] == 5
    assert sum(dropped.values()) == 6


def test_nothing_of_an_optimizer_reaches_a_frozen_table():
    optimizer = ps.Adam(0.1, lazy_adam=False, weight_decay_factor=0.5, clip_weight_max=0.01)
    engine = ps.Engine(config_of(optimizer=optimizer))
    before = engine.lookup("word", range(ROWS))
    engine.run(log_of(3))
    np.testing.assert_array_equal(engine.lookup("word", range(ROWS)), before)


def test_keys_of_a_frozen_table_read_their_start_and_take_no_room():
    engine = ps.Engine(config_of(dynamic=ps.Dynamic()))
    before = engine.lookup("word", range(2 * ROWS))
    engine.run(log_of(5))
    assert len(engine.keys("word")) == 0
    np.testing.assert_array_equal(engine.lookup("word", range(2 * ROWS)), before)
    engine.load_parameters("word", np.ones((1, DIM), np.float32), ids=[3])
    assert engine.lookup("word", [3]).tolist() == [[1.0] * DIM]


def hash_of(config, **arguments):
    engine = ps.Engine(config, num_required=2, **arguments)
    for step in range(3):
        for worker in range(2):
            engine.apply(frame(10 * step + worker), local_step=step, contributor=worker)
    return engine.state_hash()


@pytest.mark.parametrize("placement", [ps.Placement("host"), ps.Placement("cached", device_bytes=200)])
def test_a_placement_changes_no_bit(placement):
    assert hash_of(config_of(placement=placement)) == hash_of(config_of())


def test_rounds_take_frames_of_frozen_tables_alone():
    engine = ps.Engine(config_of(), workers=2)
    for worker in (1, 0):
        engine.apply(frame(worker, ["word"]), local_step=0, contributor=worker)
    assert engine.global_step == 1
    for worker in (1, 0):
        engine.apply(frame(worker), local_step=1, contributor=worker)
    assert engine.global_step == 2


def test_shares_have_the_rows_of_the_whole():
    whole = ps.Engine(config_of())
    shares = [ps.Engine(config_of(), share=(rank, 3)) for rank in range(3)]
    for step in range(3):
        for engine in (whole, *shares):
            engine.apply(frame(step))
    for name in ("word", "user"):
        for share in shares:
            ids = list(share.core.tables.held.all_ids(name))
            np.testing.assert_array_equal(share.lookup(name, ids), whole.lookup(name, ids))


# ---- from commit to commit


def commit_of(folder, trainable, steps=3, **more):
    config = config_of(trainable=trainable, optimizer=ps.Adagrad(0.1))
    return ps.Engine(config, **more).run(log_of(steps), checkpoint=folder)


def test_freezing_drops_the_slots_only_by_name(tmp_path):
    commit_of(tmp_path, True)
    frozen, trained = (config_of(trainable=kind, optimizer=ps.Adagrad(0.1)) for kind in (False, True))
    with pytest.raises(ps.StateError, match="'word' is trained with slots accumulators in the checkpoint and frozen"):
        ps.Engine.restore(tmp_path, config=frozen)
    before = ps.Engine.restore(tmp_path).lookup("word", range(ROWS))
    engine = ps.Engine.restore(tmp_path, config=frozen, reset_slots=["word"])
    assert engine.slots("word") == {}
    engine.run(log_of(6), checkpoint=tmp_path, resume=True)
    np.testing.assert_array_equal(engine.lookup("word", range(ROWS)), before)
    assert ps.Engine.restore(tmp_path).state_hash() == engine.state_hash()

    with pytest.raises(ps.StateError, match="'word' is frozen in the checkpoint and trained in the configuration"):
        ps.Engine.restore(tmp_path, config=trained)
    thawed = ps.Engine.restore(tmp_path, config=trained, reset_slots=["word"])
    np.testing.assert_array_equal(thawed.lookup("word", range(ROWS)), before)
    np.testing.assert_array_equal(np.asarray(thawed.slots("word")["accumulators"]), np.float32(0.1))
    thawed.run(log_of(7), checkpoint=tmp_path, resume=True)
    assert (thawed.lookup("word", frame(6)["word"][0]) != before[frame(6)["word"][0]]).any()


def test_a_table_without_slots_is_frozen_by_name_too(tmp_path):
    config = config_of(trainable=True, optimizer=ps.SGD(0.1))
    ps.Engine(config).run(log_of(2), checkpoint=tmp_path)
    with pytest.raises(ps.StateError, match="'word' is trained in the checkpoint and frozen in the configuration"):
        ps.Engine.restore(tmp_path, config=config_of(optimizer=ps.SGD(0.1)))


def test_a_frozen_table_may_change_its_optimizer(tmp_path):
    commit_of(tmp_path, False)
    assert ps.Engine.restore(tmp_path, config=config_of(optimizer=ps.FTRL(0.1))).global_step == 3


def test_freezing_drops_the_sums_that_wait_in_the_gate(tmp_path, caplog):
    commit_of(tmp_path, True, steps=3, num_required=2)
    config = config_of(trainable=False, optimizer=ps.Adagrad(0.1))
    engine = ps.Engine.restore(tmp_path, config=config, reset_slots=["word"])
    waited = len(np.unique(frame(2)["word"][0]))
    assert f"'word' frozen ({waited} sums of the gate dropped)" in caplog.text
    before = engine.lookup("word", range(ROWS))
    engine.flush()
    np.testing.assert_array_equal(engine.lookup("word", range(ROWS)), before)


def test_a_rollback_keeps_a_frozen_table(tmp_path):
    engine = ps.Engine(config_of())
    before = engine.lookup("word", range(ROWS))
    engine.run(log_of(2), checkpoint=tmp_path)
    engine.tag("two")
    hash_at_two = engine.lookup("user", range(ROWS))
    engine.run(log_of(4), checkpoint=tmp_path, resume=True)
    engine.rollback("two")
    np.testing.assert_array_equal(engine.lookup("user", range(ROWS)), hash_at_two)
    np.testing.assert_array_equal(engine.lookup("word", range(ROWS)), before)


# ---- the configuration


def test_a_frozen_table_needs_no_optimizer_and_is_saved(tmp_path):
    word = ps.TableConfig(ROWS, DIM, name="word", trainable=False, on_gradient="refuse")
    ps.EmbeddingConfig.from_tables([word]).save(tmp_path / "tables.pbtxt")
    text = (tmp_path / "tables.pbtxt").read_text()
    assert "trainable: false" in text
    assert "on_gradient: REFUSE" in text
    spec = ps.EmbeddingConfig.load(tmp_path / "tables.pbtxt").table("word")
    assert (spec.trainable, spec.refuses_gradients, spec.slots_bytes) == (False, True, 0)


def test_tensorflows_message_does_not_hold_a_frozen_table():
    with pytest.raises(ps.ConfigError, match="table 'word' is not trainable, which TensorFlow's message cannot say"):
        config_of().to_proto()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"trainable": 0}, "trainable must be True or False, got 0"),
        ({"trainable": False, "on_gradient": "no"}, "on_gradient must be one of drop, refuse, got 'no'"),
        ({"on_gradient": "refuse"}, "on_gradient is of a frozen table; set trainable=False, or remove it"),
    ],
)
def test_a_wrong_setting_is_one_line(arguments, problem):
    with pytest.raises(ps.ConfigError) as raised:
        ps.TableConfig(ROWS, DIM, **arguments)
    assert str(raised.value) == problem


# ---- the commands


def files(tmp_path, config, steps=2):
    config.save(tmp_path / "tables.pbtxt")
    pq.write_table(log_of(steps), tmp_path / "log.parquet")
    return tmp_path / "tables.pbtxt", tmp_path / "log.parquet"


def test_validate_counts_gradients_of_frozen_tables_or_refuses_them(tmp_path, capsys):
    code, result, text = outcome(capsys, "validate", *files(tmp_path, config_of()))
    assert (code, result["valid"]) == (0, True)
    assert result["sources"][0]["dropped"] == {"frozen:word": 12}
    assert "12 gradients of table 'word', which is frozen" in text
    code, result, text = outcome(capsys, "validate", *files(tmp_path, config_of(on_gradient="refuse")))
    assert (code, result["valid"]) == (3, False)
    assert "table 'word', which is frozen and refuses them" in text


def test_validate_opens_the_vectors(tmp_path, capsys):
    config = config_of(initializer=ps.FromFile(tmp_path / "vectors.npy"))
    code, _, text = outcome(capsys, "validate", *files(tmp_path, config))
    assert code == 3
    assert f"{tmp_path}/vectors.npy: cannot be read: No such file or directory" in text
    np.save(tmp_path / "vectors.npy", np.zeros((ROWS, DIM), np.float32))
    assert outcome(capsys, "validate", *files(tmp_path, config))[0] == 0


def test_plan_knows_that_keys_of_a_frozen_table_take_no_room(tmp_path, capsys):
    assert "no table of the configuration that is trained" in error_line(
        capsys, 4, "plan", *files(tmp_path, config_of(dynamic=ps.Dynamic()))
    )


def test_blame_says_that_a_frozen_table_has_no_history(tmp_path, capsys):
    words = ["blame", *files(tmp_path, config_of()), "--table", "word", "--id", 1]
    assert "'word' is frozen, so no gradient has changed it" in error_line(capsys, 2, *words)


def test_a_replay_names_the_frozen_table(tmp_path, capsys):
    config, log = files(tmp_path, config_of())
    code, result, text = outcome(capsys, "replay", config, log, "--out", tmp_path / "out")
    assert (code, result["dropped"]) == (0, {"frozen:word": 12})
    assert "dropped 12 rows, gradients of table 'word', which is frozen" in text
    assert pq.read_table(tmp_path / "out/word.parquet").column_names == ["id", "row"]


def test_inspect_names_the_frozen_table(tmp_path, capsys):
    config = config_of()
    config.save(tmp_path / "tables.pbtxt")
    code, result, text = outcome(capsys, "inspect", tmp_path / "tables.pbtxt")
    assert (code, result["tables"][0]["trainable"]) == (0, False)
    assert "word: 40 × 4, Adam, frozen" in text
    ps.Engine(config).save(tmp_path / "state")
    assert "word: 40 × 4, frozen" in outcome(capsys, "inspect", tmp_path / "state")[2]


def test_rows_with_slots_start_a_frozen_table(tmp_path, capsys):
    trained = ps.Engine(config_of(trainable=True))
    trained.run(log_of(2))
    trained.write_tables(tmp_path / "out")
    engine = ps.Engine(config_of())
    engine.read_tables(tmp_path / "out")
    np.testing.assert_array_equal(engine.lookup("word", range(ROWS)), trained.lookup("word", range(ROWS)))
    config, _ = files(tmp_path, config_of())
    assert outcome(capsys, "import", tmp_path / "out", tmp_path / "state", "--config", config)[0] == 0
    assert ps.Engine.restore(tmp_path / "state").slots("word") == {}
