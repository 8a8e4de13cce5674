"""A dynamic table without policies is a static table that stores only what changed: the same bits everywhere."""

import numpy as np
from dynamic import config_of, cut, log_of
from evidence import examples
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps

IDS = 13
OPTIMIZERS = {
    "sgd": lambda **options: ps.SGD(0.5, **options),
    "adagrad": lambda **options: ps.Adagrad(0.1, **options),
    "adam": lambda **options: ps.Adam(0.01, lazy_adam=True, **options),
    "ftrl": lambda **options: ps.FTRL(0.1, **options),
    "row_wise_adagrad": lambda **options: ps.RowWiseAdagrad(0.1, **options),
    "partial_row_wise_adam": lambda **options: ps.PartialRowWiseAdam(0.1, **options),
    "torch_adagrad": lambda **options: ps.TorchAdagrad(0.1, lr_decay=0.5, **options),
}


@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.booleans(),
    st.lists(st.lists(st.integers(0, IDS - 1), max_size=20), min_size=1, max_size=8),
    st.fixed_dictionaries({"num_required": st.integers(1, 3), "reduction": st.sampled_from(["mean", "sum"])}),
    st.integers(1, 30),
)
@examples(500, 50)
def test_a_table_whose_keys_all_fit_equals_a_static_table(optimizer, accumulate, steps, gate, size):
    optimizer = OPTIMIZERS[optimizer](use_gradient_accumulation=accumulate)
    table = ps.TableConfig(IDS, 4, name="user", optimizer=optimizer)
    static = ps.Engine(ps.EmbeddingConfig.from_tables([table]), **gate, threads=1)
    dynamic = ps.Engine(config_of(rows=2 * IDS, optimizer=optimizer), **gate, threads=1)
    log, deltas = log_of(steps), []
    for engine, sizes in ((static, [log.num_rows + 1]), (dynamic, [size])):
        options = {"slots": True, "op": True, "numbered": True, "flush": True}
        batches = [batch.drop_columns("checksum").to_pylist() for batch in engine.stage(cut(log, sizes), **options)]
        deltas.append([[{**row, "clock": None} for row in batch] for batch in batches])
    # The rows and slots of every step; only dynamic tables have a clock, and their checksums cover it and op.
    assert deltas[0] == deltas[1]
    for forward in (False, True):
        expected, actual = (engine.lookup("user", range(IDS), forward) for engine in (static, dynamic))
        assert expected.tobytes() == actual.tobytes()
    assert dynamic.keys("user").to_pylist() == sorted({key for step in steps for key in step})
    for part, expected in enumerate(static.retrieve_parameters("user").values()):
        assert dynamic.core.tables.dynamic["user"].read(np.arange(IDS), part).tobytes() == expected.tobytes()
