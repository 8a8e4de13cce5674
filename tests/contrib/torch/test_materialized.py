"""Models to deploy: the results of the trained model, exported, compiled and loaded in a process without penstock."""

import contextlib
import io
import shutil
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from services import service_of  # noqa: E402
from torch_models import BagConfig  # noqa: E402

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402

# What a process without penstock runs: it loads a program, and prints the bytes of its result.
SERVE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "penstock":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import torch
torch.set_num_threads(1)
kind, path, inputs = sys.argv[1:]
model = torch.export.load(path).module() if kind == "export" else torch.load(path, weights_only=False)
with torch.no_grad():
    torch.save(model(*torch.load(inputs)), path + ".out")
"""


class DLRM(torch.nn.Module):
    """Bags of static and dynamic tables, a dense part, and the products of their pairs."""

    def __init__(self, store):
        super().__init__()
        configs = [
            BagConfig("user", 50, 4, ["clicked", "bought"], "SUM"),
            BagConfig("shop", 9, 4, ["seen"], "MEAN"),
            BagConfig("page", 64, 4, ["visited", "seen"], "MEAN"),
        ]
        self.bags = pt.EmbeddingBagCollection(tables=configs, store=store)
        self.last = pt.Embedding(64, 4, table="page", store=store)
        self.below, self.above = torch.nn.Linear(3, 4), torch.nn.Linear(15 + 4, 1)

    def forward(self, dense, features, last):
        below = torch.relu(self.below(dense))
        pooled = self.bags(features).to_dict()
        vectors = torch.stack([below, *pooled.values()][:6], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        first, second = torch.triu_indices(6, 6, 1)
        return self.above(torch.cat([below + self.last(last), products[:, first, second]], 1))


def config_of(missing="zero", initializer=None):
    dynamic = ps.Dynamic(missing=missing)
    return ps.EmbeddingConfig.from_tables(
        [
            ps.TableConfig(50, 4, name="user", optimizer=ps.SGD(0.1)),
            ps.TableConfig(9, 4, name="shop", optimizer=ps.SGD(0.1)),
            ps.TableConfig(64, 4, initializer, name="page", optimizer=ps.SGD(0.1), dynamic=dynamic),
        ]
    )


def inputs_of(seed, new_keys=False, batch=3):
    rng = np.random.default_rng(seed)
    offsets = [0, 2, 2, *range(5, batch + 3)]  # an empty bag among others

    def pair(ids):
        return torch.tensor(ids), torch.tensor(offsets)

    pages = rng.integers(0, 40, offsets[-1] + batch) * 2**40 - 7
    features = {
        "clicked": pair(rng.integers(0, 50, offsets[-1])),
        "bought": pair(rng.integers(0, 50, offsets[-1])),
        "seen": pair(rng.integers(0, 9, offsets[-1])),
        "visited": pair(pages[: offsets[-1]] + new_keys),
    }
    return torch.tensor(rng.random((batch, 3), np.float32)), features, torch.tensor(pages[offsets[-1] :])


def trained(engine_or_uri, steps=6):
    torch.manual_seed(1)
    model = DLRM(pt.store(engine_or_uri))
    opt = pt.Step(model, torch.optim.SGD([*model.below.parameters(), *model.above.parameters()], lr=0.1))
    for seed in range(steps):
        opt.zero_grad()
        (model(*inputs_of(seed)) ** 2).mean().backward()
        opt.step()
    return model


def served(kind, path, inputs, tmp_path):
    """The result of a saved model in a process that cannot import penstock."""
    torch.save(inputs, tmp_path / "inputs.pt")
    subprocess.run([sys.executable, "-c", SERVE, kind, str(path), str(tmp_path / "inputs.pt")], check=True)
    return torch.load(f"{path}.out")


def test_a_program_takes_batches_of_any_size_in_a_process_without_penstock(tmp_path):
    model = trained(ps.Engine(config_of())).eval()
    batch, size = torch.export.Dim("batch"), torch.export.Dim.DYNAMIC
    pairs = dict.fromkeys(("clicked", "bought", "seen", "visited"), ({0: size}, {0: batch + 1}))
    with torch.no_grad():
        program = torch.export.export(
            pt.materialized(model), inputs_of(3), dynamic_shapes=({0: batch}, pairs, {0: batch})
        )
        torch.export.save(program, tmp_path / "model.pt2")
        inputs = inputs_of(4, batch=7)
        assert torch.equal(served("export", tmp_path / "model.pt2", inputs, tmp_path), model(*inputs))


@pytest.mark.parametrize("missing", ["zero", "initial"])
@pytest.mark.promise("A materialized model has the results of the trained one, in a process without penstock")
def test_an_exported_model_has_the_same_results_in_a_process_without_penstock(missing, tmp_path):
    model = trained(ps.Engine(config_of(missing, ps.Constant(0.5)))).eval()
    inputs = inputs_of(3, new_keys=True)
    deployed = pt.materialized(model)
    with torch.no_grad():
        expected = model(*inputs)
        assert torch.equal(deployed(*inputs), expected)
        torch.export.save(torch.export.export(deployed, inputs), tmp_path / "model.pt2")
    assert torch.equal(served("export", tmp_path / "model.pt2", inputs, tmp_path), expected)


def test_a_copy_is_apart_from_the_model_and_shares_the_rows_of_a_table():
    engine = ps.Engine(config_of())
    model = trained(engine)
    inputs, deployed = inputs_of(3), pt.materialized(model)
    before = deployed(*inputs)
    assert isinstance(model.bags, pt.EmbeddingBagCollection)
    assert deployed.bags.tables["page"].rows is deployed.last.rows
    assert deployed.training
    engine.apply({"user": ([int(inputs[1]["clicked"][0][0])], [[9.0] * 4])})
    assert torch.equal(deployed(*inputs), before)
    assert not torch.equal(model(*inputs), before)
    assert deployed.last.keys.tolist() == engine.keys("page").to_pylist()
    before.sum().backward()  # it can be trained further
    assert deployed.bags.tables["user"].weight.grad.any()


def test_a_version_gives_the_rows_of_a_commit(tmp_path):
    engine = ps.Engine(config_of())
    model = trained(engine, 2)
    inputs = inputs_of(1)
    expected = model.eval()(*inputs)
    engine.save(tmp_path / "run")
    ps.tag(tmp_path / "run", "good")
    pages = {"page": (inputs[1]["visited"][0].numpy(), np.ones((5, 4), np.float32))}
    engine.apply({"user": (np.arange(50), np.ones((50, 4), np.float32)), **pages})
    assert torch.equal(pt.materialized(model, tmp_path / "run@good")(*inputs), expected)
    assert not torch.equal(pt.materialized(model)(*inputs), expected)
    for version, problem in {"goood": "no tag 'goood'; did you mean 'good'", "7": "no commit of step 7"}.items():
        with pytest.raises(ps.StateError, match=problem):
            pt.materialized(model, tmp_path / f"run@{version}")


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (("other", 8, 4), "no table 'user'; it has other"),
        (("user", 50, 3), "table 'user' has 50 rows of dim 3, and the model expects 50 rows of dim 4"),
        (("user", 1000, 4), "has 1,000 rows of dim 4, and the model expects 50 rows"),
    ],
)
def test_a_version_of_other_tables_is_refused(table, problem, tmp_path):
    from torch_models import engine_of

    engine_of(table).save(tmp_path / "run")
    bag = pt.EmbeddingBag(50, 4, store=pt.store(engine_of()))
    with pytest.raises(ps.StateError, match=problem):
        pt.materialized(bag, tmp_path / "run")


@pytest.mark.parametrize("kind", ["static", "dynamic", "unsigned"])
@pytest.mark.parametrize("padding", [None, 3, 4, "key"])
@pytest.mark.parametrize("mode", ["single", "sum", "mean", "max"])
def test_a_saved_module_loads_where_penstock_is_absent(kind, padding, mode, tmp_path, monkeypatch):
    key_type = "uint64" if kind == "unsigned" else "int64"
    dynamic = None if kind == "static" else ps.Dynamic(key_type=key_type, missing="zero")
    table = ps.TableConfig(8, 2, ps.RowIdInitializer(1) if dynamic is None else ps.Constant(2.0),
                           ps.SGD(0.5), name="user", dynamic=dynamic)  # fmt: skip
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    ids = [3, 5, 2**64 - 9, 5] if kind == "unsigned" else [3, 5, -9 if dynamic else 0, 5]
    engine.apply({"user": (np.array(ids[1:], key_type), np.arange(6, dtype=np.float32).reshape(3, 2))})
    options = {"padding_idx": ids[2] if padding == "key" else padding, "store": pt.store(engine)}
    module = pt.Embedding(8, 2, **options) if mode == "single" else pt.EmbeddingBag(8, 2, mode=mode, **options)
    deployed = pt.materialized(torch.nn.Sequential(module))
    inputs = (torch.tensor(np.array([ids], key_type)),)
    torch.save(deployed, saved := io.BytesIO())
    assert torch.equal(deployed(*inputs), module(*inputs))
    assert b"penstock" not in saved.getvalue()
    loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    assert torch.equal(loaded(*inputs), module(*inputs))
    if kind == "dynamic" and padding == 3 and mode in ("single", "mean"):
        torch.save(deployed, tmp_path / "model.pt")
        assert torch.equal(served("save", tmp_path / "model.pt", inputs, tmp_path), module(*inputs))


def test_keys_that_read_random_rows_read_zeros_after_a_warning():
    engine = ps.Engine(config_of("initial"))
    embedding = pt.Embedding(64, 4, table="page", store=pt.store(engine))
    with pytest.warns(UserWarning, match="table 'page': keys without a row read zeros .* missing: ZERO") as warned:
        deployed = pt.materialized(embedding)
    assert [warning.filename for warning in warned] == [__file__]
    assert deployed(torch.tensor([5])).tolist() == [[0.0] * 4]


@pytest.mark.parametrize("over_service", [False, True])
@pytest.mark.parametrize("key_type", ["int64", "uint64"])
def test_keys_without_a_row_have_their_vector_of_a_file(key_type, over_service, tmp_path):
    keys = np.array([9, 3, 2**63 - 2], np.int64).view(key_type)
    np.savez(tmp_path / "v.npz", keys=keys, vectors=np.arange(12, dtype=np.float32).reshape(3, 4))
    start, dynamic = ps.FromFile(tmp_path / "v.npz"), ps.Dynamic(key_type=key_type)
    table = ps.TableConfig(64, 4, start, ps.SGD(1.0), name="page", dynamic=dynamic)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    engine.apply({"page": (keys[1:2], np.ones((1, 4), np.float32))})
    with service_of(engine) if over_service else contextlib.nullcontext() as service:
        store = pt.store(service.address.uri if service else engine)
        embedding = pt.Embedding(64, 4, table="page", store=store)
        ids = torch.tensor([9, 3, 2**63 - 2, 5])
        assert torch.equal(pt.materialized(embedding)(ids), embedding(ids))
        assert embedding(ids)[1].tolist() == [3.0, 4.0, 5.0, 6.0]
        store.close()


def test_a_model_of_a_service_is_of_one_step():
    with service_of(ps.Engine(config_of())) as service:
        model = trained(service.address.uri)
        inputs = inputs_of(2, new_keys=True)
        assert torch.equal(pt.materialized(model)(*inputs), model.eval()(*inputs))
        model.last.store.close()


def test_an_embedding_collection_keeps_its_names_and_indices():
    store = pt.store(ps.Engine(config_of()))
    configs = [BagConfig("user", 50, 4, ["clicked", "seen"]), BagConfig("shop", 9, 4, ["seen"])]
    collection = pt.EmbeddingCollection(tables=configs, need_indices=True, store=store)
    features = inputs_of(0)[1]
    results, expected = pt.materialized(collection)(features), collection(features)
    assert list(results) == list(expected) == ["clicked", "seen@user", "seen@shop"]
    for name, jagged in expected.items():
        assert torch.equal(results[name].values(), jagged.values())
        assert torch.equal(results[name].weights(), jagged.weights())


@pytest.mark.filterwarnings("ignore")  # of torch itself
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_aotinductor_compiles_a_materialized_model(tmp_path):
    model = trained(ps.Engine(config_of())).eval()
    inputs = inputs_of(3)
    with torch.no_grad():
        program = torch.export.export(pt.materialized(model), inputs)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(*inputs), model(*inputs))


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"materialized: expected a torch\.nn\.Module, got dict"):
        pt.materialized({})
