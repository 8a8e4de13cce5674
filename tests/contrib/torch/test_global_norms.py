"""``clip { global_norm }`` next to ``torch.nn.utils.clip_grad_norm_`` over the rows of equal tables."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import penstock as ps  # noqa: E402

ROWS, DIMS = 200, {"user": 16, "item": 5}


def gradients_of(step):
    rng = np.random.default_rng(step)
    scale = 10.0 ** rng.integers(-3, 3)
    ids = {name: rng.integers(0, ROWS, 60) for name in DIMS}  # repeated ids are summed
    return {name: (ids[name], (rng.normal(size=(60, dim)) * scale).astype(np.float32)) for name, dim in DIMS.items()}


@pytest.mark.parametrize("norm", [0.5, 20.0, 1000.0])
def test_steps_are_those_of_torch(norm):
    tables = [ps.TableConfig(ROWS, dim, ps.Constant(0.0), ps.SGD(1.0), name=name) for name, dim in DIMS.items()]
    engine = ps.Engine(ps.EmbeddingConfig.from_tables(tables, clip=ps.Clip(global_norm=norm)))
    num_clipped = 0
    for step in range(12):
        weights = {name: torch.nn.Parameter(torch.zeros(ROWS, dim)) for name, dim in DIMS.items()}
        for name, (ids, grads) in gradients_of(step).items():
            weights[name].grad = torch.zeros(ROWS, DIMS[name]).index_add_(0, torch.from_numpy(ids), torch.tensor(grads))
        total = torch.nn.utils.clip_grad_norm_(weights.values(), norm)
        num_clipped += bool(total > norm)
        for name, dim in DIMS.items():
            engine.load_parameters(name, np.zeros((ROWS, dim)))
        engine.apply(gradients_of(step))
        for name in DIMS:
            wanted, largest = weights[name].grad.numpy(), float(weights[name].grad.abs().max())
            np.testing.assert_allclose(-engine.table(name), wanted, rtol=1e-6, atol=1e-6 * largest)
    assert engine.core.counters.clipped_steps == num_clipped
    assert num_clipped > 0
