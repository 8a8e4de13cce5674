"""Example streams with bad lookups: refused by name, dropped, or put into a quarantine."""

import numpy as np
import pyarrow as pa
import pytest
from example_streams import GRADIENTS, USER, config_of, examples, structs

import penstock as ps


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


def test_without_a_combiner_it_is_a_configuration_error():
    config = ps.EmbeddingConfig.from_proto(config_of().to_proto())  # TensorFlow's message has none
    with pytest.raises(ps.ConfigError, match="feature 'user': the configuration has no combiner for it"):
        ps.Engine(config).run([examples(user=structs(USER, GRADIENTS))])


def test_repaired_rows_of_a_quarantine_complete_the_step(tmp_path):
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
