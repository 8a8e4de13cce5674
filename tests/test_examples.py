"""Example streams: structs of ids, weights and gradients of activations, expanded to the rows they stand for."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reference

import penstock as ps
from penstock.cli.main import main

USER = [[0, 2], [], [4], [1, 1, 3]]
GRADIENTS = np.random.default_rng(5).normal(size=(4, 2)).astype(np.float32)


def config_of(combiner="mean", features=("user",), dims=(2,), **options):
    tables = [ps.TableConfig(6, dim, name=f"t{n}", combiner=combiner) for n, dim in enumerate(dims)]
    listed = [
        ps.FeatureConfig(tables[min(n, len(tables) - 1)], name=name, **options) for n, name in enumerate(features)
    ]
    return ps.EmbeddingConfig.from_features(listed, 4, ps.Adagrad(0.5))


def structs(ids, gradients, weights=None, kind=None):
    """One feature's column."""
    fields = {
        "ids": pa.array(ids, pa.list_(kind or pa.int64())),
        "gradient": pa.array(list(np.asarray(gradients)), pa.list_(pa.float32(), np.shape(gradients)[1])),
    }
    if weights is not None:
        fields["weights"] = pa.array(weights, pa.list_(pa.float32()))
    return pa.StructArray.from_arrays(list(fields.values()), list(fields))


def examples(step=None, **features):
    batch = dict(features)
    if step is not None:
        batch["step"] = pa.array(step, pa.int64())
    return pa.record_batch(batch)


def by_hand(ids, gradients, combiner, weights=None):
    """(ids, gradients) of the rows of one feature, lookup by lookup."""
    samples = np.repeat(np.arange(len(ids)), [len(row) for row in ids])
    flat = np.concatenate(weights or [np.ones(len(row)) for row in ids]).astype(np.float32)
    by = reference.gains(samples, flat, len(ids), combiner)
    return np.concatenate(ids).astype(np.int64), reference.row_gradients(np.asarray(gradients), samples, by)


def hash_of(config, batches, **options):
    engine = ps.Engine(config)
    engine.run(batches, **options)
    return engine.state_hash()


@pytest.mark.parametrize("weights", [None, [[0.5, 0.25], [], [3], [1, 0.3, 0.7]]], ids=["plain", "weighted"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_the_state_is_that_of_the_rows_expanded_by_hand(combiner, weights):
    config = config_of(combiner)
    rows = ps.Engine(config)
    rows.apply({"t0": by_hand(USER, GRADIENTS, combiner, weights)})
    assert hash_of(config, [examples(user=structs(USER, GRADIENTS, weights))]) == rows.state_hash()


def test_a_stage_gives_the_rows_that_examples_look_up():
    engine = ps.Engine(config_of())
    (delta,) = engine.stage([examples(user=structs(USER, GRADIENTS))])
    assert delta["id"].to_pylist() == [0, 1, 2, 3, 4]
    assert delta["row"].to_pylist() == engine.lookup("t0", range(5)).tolist()


def test_it_is_also_that_of_send_gradients():
    ours = ps.Engine(config_of("sqrtn"))
    _, dedup = ours.recv_activations({"user": USER})
    ours.send_gradients({"user": GRADIENTS}, deduplication_data=dedup)
    assert hash_of(config_of("sqrtn"), [examples(user=structs(USER, GRADIENTS))]) == ours.state_hash()


def test_features_that_share_a_table_come_example_by_example():
    config = config_of("sum", ("user", "friend"))
    other = GRADIENTS * np.float32(1.7)
    friend = [[2], [2, 0], [2], [2]]
    rows = ps.Engine(config)
    found = [], []
    for one in range(4):
        for ids, gradients in ((USER, GRADIENTS), (friend, other)):
            found[0].extend(ids[one])
            found[1].extend([gradients[one]] * len(ids[one]))
    rows.apply({"t0": (np.array(found[0]), np.array(found[1]))})
    stream = examples(friend=structs(friend, other), user=structs(USER, GRADIENTS))  # column order does not matter
    assert hash_of(config, [stream]) == rows.state_hash()


def test_tables_of_several_dims_and_columns_that_nobody_asked_for():
    config = config_of("mean", ("user", "item"), (2, 3))
    wide = np.random.default_rng(6).normal(size=(4, 3)).astype(np.float32)
    rows = ps.Engine(config)
    rows.apply({"t0": by_hand(USER, GRADIENTS, "mean"), "t1": by_hand(USER[::-1], wide, "mean")})
    extra = {"label": pa.array([0, 1, 1, 0]), "other": structs(USER, wide)}
    stream = examples(user=structs(USER, GRADIENTS), item=structs(USER[::-1], wide), **extra)
    assert hash_of(config, [stream]) == rows.state_hash()


@pytest.mark.parametrize("sizes", [[4], [1, 3], [2, 2], [1, 1, 1, 1], [3, 0, 1]])
def test_batches_inside_a_frame_do_not_matter(sizes):
    config = config_of("mean", ("user", "friend"))
    whole = examples([7] * 4, user=structs(USER, GRADIENTS), friend=structs([[3], [3], [], [3]], GRADIENTS))
    ends = np.cumsum([0, *sizes])
    pieces = [whole.slice(start, stop - start) for start, stop in pairwise(ends)]
    assert hash_of(config, pieces) == hash_of(config, [whole])


def test_steps_make_frames_and_batches_do_where_there_are_none():
    config = config_of("sum")
    engine = ps.Engine(config)
    report = engine.run([examples([0, 0, 1, 2], user=structs(USER[::-1], GRADIENTS))])
    assert (report.frames, report.steps, report.rows) == (3, 3, 6)
    report = ps.Engine(config).run([examples(user=structs(USER, GRADIENTS))] * 2)
    assert (report.frames, report.rows) == (2, 12)


def test_examples_that_look_nothing_up_make_a_frame_too():
    config = ps.EmbeddingConfig.from_features(
        [ps.FeatureConfig(ps.TableConfig(6, 2, name="t0"), name="user")], 4, ps.SGD(ps.DynamicLearningRate(0))
    )
    rates = pa.array([[0.5]] * 4, pa.list_(pa.float32()))
    stream = examples([0, 0, 1, 2], user=structs(USER[::-1], GRADIENTS)).append_column("learning_rates", rates)
    report = ps.Engine(config).run([stream])
    assert (report.frames, report.steps, report.rows) == (3, 3, 6)


def test_contribution_rows_counts_examples(tmp_path):
    stream = examples(user=structs(USER, GRADIENTS))
    pq.write_table(pa.Table.from_batches([stream] * 2), tmp_path / "log.parquet")
    report = ps.Engine(config_of()).run(tmp_path / "log.parquet", contribution_rows=2)
    assert (report.frames, report.rows) == (4, 12)
    report = ps.Engine(config_of()).run(tmp_path / "log.parquet", contribution_rows=3)
    assert (report.frames, report.rows) == (3, 12)


def test_a_sequence_has_a_gradient_per_position_and_none_beyond_its_length():
    config = config_of("sum", max_sequence_length=2)
    gradients = np.arange(16, dtype=np.float32).reshape(4, 4)
    rows = ps.Engine(config)
    wanted = gradients.reshape(4, 2, 2)
    taken = [wanted[0, 0], wanted[0, 1], wanted[2, 0], wanted[3, 0], wanted[3, 1]]
    rows.apply({"t0": (np.array([0, 2, 4, 1, 1]), np.array(taken))})
    assert hash_of(config, [examples(user=structs(USER, gradients))]) == rows.state_hash()


def test_null_features_and_lists_look_nothing_up():
    column = pa.array(
        [{"ids": [1], "gradient": [1.0, 2.0]}, None, {"ids": None, "gradient": None}, {"ids": [], "gradient": None}],
        pa.struct([("ids", pa.list_(pa.int32())), ("gradient", pa.list_(pa.float64()))]),
    )
    rows = ps.Engine(config_of())
    rows.apply({"t0": (np.array([1]), np.array([[1, 2]], np.float32))})
    assert hash_of(config_of(), [examples(user=column)]) == rows.state_hash()


def test_ids_may_be_a_list_of_any_kind():
    whole = hash_of(config_of(), [examples(user=structs([[1, 2], [3, 3]], GRADIENTS[:2]))])
    for kind in (pa.list_(pa.uint64()), pa.large_list(pa.int8()), pa.list_(pa.int32(), 2)):
        column = pa.StructArray.from_arrays(
            [pa.array([[1, 2], [3, 3]], kind), pa.array(GRADIENTS[:2].tolist(), pa.large_list(pa.float32()))],
            ["ids", "gradient"],
        )
        assert hash_of(config_of(), [examples(user=column)]) == whole
    flat = pa.array([1, 2])
    column = pa.StructArray.from_arrays([flat, pa.array(GRADIENTS[:2].tolist())], ["ids", "gradient"])
    with pytest.raises(ps.InputError, match="column 'user': expected a list of integers in 'ids', got int64"):
        ps.Engine(config_of()).run([examples(user=column)])


def test_a_feature_has_one_column():
    column = structs(USER, GRADIENTS)
    with pytest.raises(ps.InputError, match="column 'user': 2 columns have this name"):
        ps.Engine(config_of()).run([pa.RecordBatch.from_arrays([column, column], ["user", "user"])])


def test_roles_may_have_other_names():
    stream = examples(user=structs(USER, GRADIENTS)).append_column("when", pa.array([0, 0, 1, 1]))
    assert ps.Engine(config_of()).run([stream], columns={"step": "when"}).frames == 2


# ---- what is refused


def bad(**change):
    """A column whose example 3 is bad."""
    ids, gradients = [list(row) for row in USER], GRADIENTS.copy()
    if "id" in change:
        ids[3][1] = change["id"]
    if "value" in change:
        gradients[3, 1] = change["value"]
    return [examples(user=structs(USER, GRADIENTS)), examples(user=structs(ids, gradients))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": 6}, r"batch 1, row 3, column 'user': expected 0 <= id < 6 .*got 6 \[id_out_of_range\]"),
        ({"id": None}, r"batch 1, row 3, column 'user': expected an id, got null \[id_null\]"),
        (
            {"value": np.nan},
            r"batch 1, row 3, column 'user': expected values that are finite .*\[gradient_not_finite\]",
        ),
    ],
)
def test_a_bad_example_is_named_and_the_frames_before_stay(change, message):
    engine, whole = ps.Engine(config_of()), ps.Engine(config_of())
    with pytest.raises(ps.InputError, match=message):
        engine.run(bad(**change))
    whole.run(bad(**change)[:1])
    assert engine.state_hash() == whole.state_hash()
    assert sum(ps.Engine(config_of()).run(bad(**change), on_bad_row="drop").dropped.values()) >= 1


def test_weights_that_do_not_fit_their_ids_are_named():
    column = structs(USER, GRADIENTS, [[1, 1], [], [1], [1, 1]])
    with pytest.raises(ps.InputError, match="row 3, column 'user': expected 3 weights, one per id, got 2"):
        ps.Engine(config_of()).run([examples(user=column)])


def test_a_gradient_of_another_length_is_named():
    kind = pa.struct([("ids", pa.list_(pa.int32())), ("gradient", pa.list_(pa.float32()))])
    column = pa.array([{"ids": [1], "gradient": [1.0, 2.0]}, {"ids": [1], "gradient": [1.0]}], kind)
    with pytest.raises(ps.InputError, match="row 1, column 'user': expected 2 floats in 'gradient', got 1"):
        ps.Engine(config_of()).run([examples(user=column)])
    with pytest.raises(ps.InputError, match="column 'user': expected 2 floats in 'gradient', got 3"):
        ps.Engine(config_of()).run([examples(user=structs([[1]], [[1, 2, 3]]))])


def test_a_missing_gradient_is_a_bad_row():
    kind = pa.struct([("ids", pa.list_(pa.int32())), ("gradient", pa.list_(pa.float32(), 2))])
    column = pa.array([{"ids": [1], "gradient": None}], kind)
    with pytest.raises(ps.InputError, match="row 0, column 'user': expected 2 floats, got null"):
        ps.Engine(config_of()).run([examples(user=column)])


def test_a_column_that_is_no_feature_gets_a_suggestion():
    with pytest.raises(ps.InputError, match=r"column 'users': .*did you mean 'user'"):
        ps.Engine(config_of()).run([examples(users=structs(USER, GRADIENTS))])


def test_without_a_combiner_it_is_a_configuration_error():
    config = ps.EmbeddingConfig.from_proto(config_of().to_proto())  # TensorFlow's message has none
    with pytest.raises(ps.ConfigError, match="feature 'user': the configuration does not say its combiner"):
        ps.Engine(config).run([examples(user=structs(USER, GRADIENTS))])


def read(path):
    with pa.ipc.open_stream(path) as reader:
        return [row for one in reader for row in one.to_pylist()]


def bad_everywhere():
    """Two features; every kind of bad lookup."""
    user, item = GRADIENTS.copy(), np.full((4, 3), 0.5, np.float32)
    user[3, 0] = np.inf
    columns = {
        "user": structs([[0, 9], [], [4, None], [1]], user),
        "item": structs([[2**63 + 5, 1], [1], [2], [3]], item, [[1, 3], [1], [None], [1]], pa.uint64()),
    }
    return config_of("mean", ("user", "item"), (2, 3)), examples([7] * 4, **columns)


def test_bad_lookups_are_put_aside_as_the_rows_they_are(tmp_path):
    """Each with its own gradient, times its gain: mended, it is a row of a row stream."""
    config, stream = bad_everywhere()
    report = ps.Engine(config).run([stream], on_bad_row=f"quarantine={tmp_path}/bad.arrows")
    found = read(tmp_path / "bad.arrows")
    assert [(row["row_index"], row["table"], row["id"], row["id_text"], row["reason"]) for row in found] == [
        (0, "t0", 9, None, "id_out_of_range"),
        (0, "t1", None, str(2**63 + 5), "id_out_of_range"),
        (2, "t0", None, None, "id_null"),
        (2, "t1", 2, None, "gradient_not_finite"),
        (3, "t0", 1, None, "gradient_not_finite"),
    ]
    assert {row["origin_step"] for row in found} == {7}
    assert found[0]["gradient"] == (GRADIENTS[0] / 2).tolist()  # of two ids, and the other keeps its half
    assert found[1]["gradient"] == [0.125] * 3  # a weight of 1 among 4
    assert report.dropped == {"id_out_of_range": 2, "id_null": 1, "gradient_not_finite": 2}
    assert report.rows == 10


def test_what_was_put_aside_and_mended_is_what_was_missing(tmp_path):
    config = config_of("mean", ("user", "item"), (2, 3))
    wide = np.full((4, 3), 0.5, np.float32)
    good = examples(user=structs(USER, GRADIENTS), item=structs([[2], [1], [], [5]], wide))
    bad = examples(user=structs(USER, GRADIENTS), item=structs([[2], [1], [], [8]], wide))
    whole, mended = ps.Engine(config, num_required=2), ps.Engine(config, num_required=2)
    whole.apply({"t0": (np.zeros(0, np.int64), np.zeros((0, 2), np.float32))})
    whole.run([good])
    mended.run([bad], on_bad_row=f"quarantine={tmp_path}/bad.arrows")
    table = pa.ipc.open_stream(tmp_path / "bad.arrows").read_all()
    ids = table.schema.get_field_index("id")
    mended.run(table.set_column(ids, "id", pa.array([5])).to_batches())
    assert mended.lookup("t1", range(6)).tobytes() == whole.lookup("t1", range(6)).tobytes()


@pytest.mark.parametrize(
    ("nested", "columns"),
    [
        (lambda user, item: {"user": {"seen": user}, "item": item}, ("user/seen", "item")),
        (lambda user, item: [user, (item,)], ("0", "1/0")),
    ],
    ids=["dictionaries", "list"],
)
def test_features_without_names_have_their_key_paths_as_columns(nested, columns):
    item_ids, wide = [[2], [1], [], [5]], np.full((4, 3), 0.5, np.float32)
    tables = ps.TableConfig(6, 2, name="t0"), ps.TableConfig(6, 3, name="t1")
    features = nested(*map(ps.FeatureConfig, tables))
    config = ps.EmbeddingConfig.from_features(features, 4, ps.Adagrad(0.5))
    stream = {columns[0]: structs(USER, GRADIENTS), columns[1]: structs(item_ids, wide)}
    named = examples(user=structs(USER, GRADIENTS), item=structs(item_ids, wide))
    assert hash_of(config, [examples(**stream)]) == hash_of(config_of("mean", ("user", "item"), (2, 3)), [named])
    bad = examples(**stream | {columns[0]: structs([[0, 2], [], [7], []], GRADIENTS)})
    with pytest.raises(ps.InputError, match=f"row 2, column '{columns[0]}': expected 0 <= id < 6 .*got 7"):
        ps.Engine(config).run([bad])


def test_columns_of_features_without_names_are_told_what_they_are_called():
    table = ps.TableConfig(9, 2, name="t")
    stream = examples(user=structs(USER, GRADIENTS))
    for features, message in (
        ([ps.FeatureConfig(table)], r"one of its features \(0\); features without a name go by their key path"),
        ({"users": ps.FeatureConfig(table)}, r"one of its features \(users\); did you mean 'users'"),
    ):
        config = ps.EmbeddingConfig.from_features(features, 4, ps.SGD(0.1))
        with pytest.raises(ps.InputError, match=message):
            ps.Engine(config).run([stream])


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_a_length_that_the_shape_does_not_end_in_is_combined_as_by_recv_activations(combiner):
    config = config_of(combiner, max_sequence_length=3, output_shape=(4,))
    ours, theirs = ps.Engine(config), ps.Engine(config)
    (activations,), dedup = theirs.recv_activations([USER])
    assert activations.shape == (4, 2)
    theirs.send_gradients([GRADIENTS], deduplication_data=dedup)
    weights = [[1.0] * len(row) for row in USER]
    report = ours.run([examples(user=structs(USER, GRADIENTS, weights))])
    assert (report.rows, report.truncated) == (6, 0)
    assert ours.state_hash() == theirs.state_hash()
    wide = examples(user=structs(USER, np.ones((4, 6), np.float32)))
    with pytest.raises(ps.InputError, match=r"expected 2 floats .* got 6; its ids are combined, since its shape \[4\]"):
        ours.run([wide])


def test_lookups_beyond_a_sequences_length_are_counted(tmp_path, capsys):
    config = config_of("sum", max_sequence_length=2)
    stream = examples([0, 0, 1, 1], user=structs(USER, np.ones((4, 4), np.float32)))
    report = ps.Engine(config).run([stream])
    assert (report.rows, report.truncated) == (5, 1)
    assert ps.Engine(config).run([stream], limit=1).truncated == 0  # the long one is in the second frame
    config.save(tmp_path / "c.pbtxt")
    with pa.ipc.new_stream(tmp_path / "log.arrow", stream.schema) as writer:
        writer.write(stream)
    for command in ("replay", "validate"):
        assert main([command, str(tmp_path / "c.pbtxt"), str(tmp_path / "log.arrow")]) == 0
        assert "truncated 1 ids beyond the length of their sequence" in " ".join(capsys.readouterr().out.split())


# ---- the command line


def test_replay_and_validate_take_example_streams(tmp_path, capsys):
    config_of().save(tmp_path / "c.pbtxt")
    stream = examples(user=structs(USER, GRADIENTS))
    with pa.ipc.new_stream(tmp_path / "log.arrow", stream.schema) as writer:
        writer.write(stream)
    assert main(["replay", str(tmp_path / "c.pbtxt"), str(tmp_path / "log.arrow")]) == 0
    assert hash_of(config_of(), [stream]) in capsys.readouterr().out
    assert main(["validate", str(tmp_path / "c.pbtxt"), str(tmp_path / "log.arrow")]) == 0
    assert main(["inspect", str(tmp_path / "log.arrow")]) == 0
