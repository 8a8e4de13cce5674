"""Example streams: structs of ids, weights and gradients of activations, expanded to the rows they stand for."""

import numpy as np
import pyarrow as pa
import pytest
from example_streams import GRADIENTS, USER, config_of, examples, hash_of, structs
from ipc import write

import penstock as ps
from penstock.cli.main import main


def test_example_streams_give_the_state_of_send_gradients():
    ours = ps.Engine(config_of("sqrtn"))
    _, dedup = ours.recv_activations({"user": USER})
    ours.send_gradients({"user": GRADIENTS}, deduplication_data=dedup)
    assert hash_of(config_of("sqrtn"), [examples(user=structs(USER, GRADIENTS))]) == ours.state_hash()


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


def test_unknown_columns_suggest_the_key_paths_of_features():
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
    assert (activations.shape, dedup.truncated) == ((4, 2), 0)
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
    write(tmp_path / "log.arrow", [stream])
    for command in ("replay", "validate"):
        assert main([command, str(tmp_path / "c.pbtxt"), str(tmp_path / "log.arrow")]) == 0
        assert "truncated 1 ids beyond the length of their sequence" in " ".join(capsys.readouterr().out.split())


# ---- the command line


def test_replay_and_validate_take_example_streams(tmp_path, capsys):
    config_of().save(tmp_path / "c.pbtxt")
    stream = examples(user=structs(USER, GRADIENTS))
    write(tmp_path / "log.arrow", [stream])
    assert main(["replay", str(tmp_path / "c.pbtxt"), str(tmp_path / "log.arrow")]) == 0
    assert hash_of(config_of(), [stream]) in capsys.readouterr().out
    assert main(["validate", str(tmp_path / "c.pbtxt"), str(tmp_path / "log.arrow")]) == 0
    assert main(["inspect", str(tmp_path / "log.arrow")]) == 0
