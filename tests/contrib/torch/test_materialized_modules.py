"""Modules to deploy, one by one: what they share, take and refuse, and what of the model's own they keep."""

import io

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from services import service_of  # noqa: E402
from torch_models import BagConfig  # noqa: E402

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402
from penstock.serving.flight import Client  # noqa: E402

KINDS = {"static": None, "dynamic": ps.Dynamic(missing="zero")}


def engine_of(kind="static", rows=8, optimizer=None, **options):
    """An engine whose rows of ``user`` are all different."""
    table = ps.TableConfig(rows, 2, name="user", dynamic=KINDS[kind], optimizer=optimizer or ps.SGD(0.5), **options)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    ids = np.arange(rows)
    engine.load_parameters("user", np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2) / 3, ids=ids)
    return engine


def store_of(kind="static", **options):
    return pt.store(engine_of(kind, **options))


class Nested(torch.nn.Module):
    """A module around another one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids)


# ---- the same results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("mode", "weights"), [("sum", None), ("sum", [0.5, 2.0, -1.0, 3.0, 1.0]), ("mean", None), ("max", None)]
)
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_a_bag_has_the_same_bits(kind, dtype, mode, weights, include_last_offset):
    bag = pt.EmbeddingBag(8, 2, mode=mode, include_last_offset=include_last_offset, padding_idx=4, dtype=dtype,
                          store=store_of(kind))  # fmt: skip
    offsets = torch.tensor([0, 2, 2, 5] if include_last_offset else [0, 2, 2])
    inputs = [torch.tensor([5, 4, 3, 5, 7]), offsets]
    inputs += [] if weights is None else [torch.tensor(weights, dtype=dtype)]
    deployed = pt.materialized(bag)
    assert torch.equal(deployed(*inputs), bag(*inputs))
    if dtype == torch.float32 and include_last_offset:
        assert torch.equal(torch.export.export(deployed, tuple(inputs)).module()(*inputs), bag(*inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_collection_count_as_before(kind):
    configs = [BagConfig("user", 8, 2, ["clicked", "bought"])]
    bags = pt.EmbeddingBagCollection(tables=configs, is_weighted=True, store=store_of(kind))
    weights = torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64)
    features = dict.fromkeys(("clicked", "bought"), (torch.tensor([5, 3, 5]), torch.tensor([0, 1, 3]), weights))
    deployed = pt.materialized(bags)
    assert torch.equal(deployed(features).values(), bags(features).values())
    features["bought"] = features["bought"][:2]
    with pytest.raises(ps.UsageError, match="feature 'bought': is_weighted=True needs weights"):
        deployed(features)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.uint64])
def test_features_of_a_collection_have_keys_of_any_type(dtype):
    dynamic = ps.Dynamic(key_type="uint64", missing="zero")
    table = ps.TableConfig(8, 2, name="user", optimizer=ps.SGD(0.5), dynamic=dynamic)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    keys = [3, 5, 2**64 - 9 if dtype == torch.uint64 else 9]
    engine.load_parameters("user", np.arange(6, dtype=np.float32).reshape(3, 2), ids=np.array(keys, np.uint64))
    bags = pt.EmbeddingBagCollection(tables=[BagConfig("user", 8, 2, ["clicked"], "MEAN")], store=pt.store(engine))
    features = {"clicked": (torch.tensor([*keys, 7], dtype=dtype), torch.tensor([0, 1, 4]))}
    assert torch.equal(pt.materialized(bags)(features)["clicked"], bags(features)["clicked"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [[], [[3, 4]], [[[7], [0]]]])
def test_ids_of_any_shape_have_the_same_rows(kind, ids):
    embedding = pt.Embedding(8, 2, store=store_of(kind))
    ids = torch.tensor(ids, dtype=torch.int32)
    assert torch.equal(pt.materialized(embedding)(ids), embedding(ids))


def test_a_dynamic_table_without_rows_has_that_of_other_keys():
    table = ps.TableConfig(8, 2, ps.Constant(0.5), ps.SGD(0.5), name="user", dynamic=ps.Dynamic())
    bag = pt.EmbeddingBag(8, 2, padding_idx=1, store=pt.store(ps.Engine(ps.EmbeddingConfig.from_tables([table]))))
    deployed, ids = pt.materialized(bag), torch.tensor([[2**62, -3], [1, 1]])
    assert deployed.keys.tolist() == [1]
    assert torch.equal(deployed(ids), bag(ids))
    assert deployed(ids).tolist() == [[0.5, 0.5], [0.0, 0.0]]


def test_rows_of_a_version_pass_through_the_simulated_quantization(tmp_path):
    engine = engine_of(quantization_config=ps.QuantizationConfig(3, 0.0, 4.0))
    engine.save(tmp_path / "run")
    embedding = pt.Embedding(8, 2, store=pt.store(engine))
    expected = embedding(torch.arange(8))
    assert set(expected.flatten().tolist()) == {0.0, 2.0, 4.0}
    for version in (None, tmp_path / "run"):
        assert torch.equal(pt.materialized(embedding, version)(torch.arange(8)), expected)


def test_float_ids_are_refused_as_in_torch():
    deployed = pt.materialized(pt.Embedding(8, 2, store=store_of("dynamic")))
    with pytest.raises(AssertionError, match="ids: expected integers"):
        deployed(torch.tensor([5.5]))


# ---- what modules share


def test_modules_of_one_table_share_its_rows_unless_padding_reads_as_zeros():
    store = store_of()
    plain, padded = pt.EmbeddingBag(8, 2, store=store), pt.EmbeddingBag(8, 2, padding_idx=3, store=store)
    zeroed = pt.Embedding(8, 2, padding_idx=3, store=store)
    deployed = pt.materialized(torch.nn.ModuleList([plain, padded, zeroed, plain, Nested(plain)]))
    assert deployed[1].weight is deployed[0].weight is not deployed[2].weight
    assert deployed[3] is deployed[4].inner is deployed[0]
    assert len(list(deployed.parameters())) == 2
    ids = torch.tensor([[3, 5], [3, 3]])
    for before, after in zip([plain, padded, zeroed], deployed, strict=False):
        assert torch.equal(after(ids), before(ids))


def test_a_collection_that_a_model_uses_twice_stays_one_module():
    bags = pt.EmbeddingBagCollection(tables=[BagConfig("user", 8, 2, ["clicked"])], store=store_of())
    deployed = pt.materialized(torch.nn.ModuleList([bags, torch.nn.ModuleDict({"again": bags})]))
    assert deployed[1]["again"] is deployed[0]
    assert [name for name, _ in deployed.named_parameters()] == ["0.tables.user.weight"]


def test_tables_of_a_collection_may_have_any_name():
    names = ["items", "a.b", "a_b", "forward"]
    tables = [ps.TableConfig(8, 2, ps.Constant(row), ps.SGD(0.5), name=name) for row, name in enumerate(names)]
    configs = [BagConfig(name, 8, 2, [f"of {name}"]) for name in names]
    store = pt.store(ps.Engine(ps.EmbeddingConfig.from_tables(tables)))
    bags = pt.EmbeddingBagCollection(tables=configs, store=store)
    features = {f"of {name}": (torch.tensor([5, 3]), torch.tensor([0, 2])) for name in names}
    deployed = pt.materialized(bags)
    assert deployed(features).values().tolist() == bags(features).values().tolist() == [[0, 0, 2, 2, 4, 4, 6, 6]]
    assert list(deployed.tables) == ["items_", "a_b", "a_b_", "forward_"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_moves_and_is_saved_as_torchs_are(kind):
    deployed = pt.materialized(pt.Embedding(8, 2, store=store_of(kind)))
    names = ["weight"] if kind == "static" else ["rows", "keys"]
    assert [*deployed.state_dict()] == names
    assert [name for name, _ in deployed.named_parameters()] == names[:1]
    before = deployed(torch.tensor([5, 3]))
    deployed.double()
    assert torch.equal(deployed(torch.tensor([5, 3])), before.double())
    assert deployed.to("meta")(torch.tensor([5, 3], device="meta")).device.type == "meta"
    if kind == "dynamic":
        assert deployed.keys.dtype == torch.int64


def test_rows_that_all_their_modules_freeze_stay_frozen():
    store = store_of()
    first, second = pt.Embedding(8, 2, store=store), pt.EmbeddingBag(8, 2, store=store).requires_grad_(False)
    assert not pt.materialized(second).weight.requires_grad
    deployed = pt.materialized(torch.nn.ModuleList([first, second]))
    assert deployed[1].weight.requires_grad
    assert not pt.materialized(pt.requires_grad_(torch.nn.Sequential(first), False))[0].weight.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_copy_are_scaled_as_before(kind):
    module = pt.Embedding(8, 2, scale_grad_by_freq=True, store=store_of(kind))
    deployed = pt.materialized(module)
    deployed(torch.tensor([5, 5, 3])).sum().backward()
    (weight,) = deployed.parameters()
    assert weight.grad[[3, 5]].tolist() == [[1.0, 1.0], [1.0, 1.0]]


# ---- what of the model's own stays


def test_hooks_stay_and_are_those_of_the_copy():
    class Hooked(Nested):
        def __init__(self, inner):
            super().__init__(inner)
            self.scale = torch.nn.Parameter(torch.ones(()))
            inner.register_forward_hook(self.scaled)

        def scaled(self, module, inputs, output):
            return output * self.scale

    model = Hooked(pt.Embedding(8, 2, store=store_of()))
    deployed = pt.materialized(model)
    before = model(torch.tensor([5]))
    with torch.no_grad():
        model.scale.zero_()
    assert torch.equal(deployed(torch.tensor([5])), before)


def test_training_modes_stay():
    store = store_of()
    model = torch.nn.ModuleList([pt.Embedding(8, 2, store=store), pt.EmbeddingBag(8, 2, store=store).eval()])
    assert [part.training for part in pt.materialized(model)] == [True, False]


def test_a_model_may_refer_to_its_store_and_engine():
    engine = engine_of()
    model = Nested(pt.Embedding(8, 2, store=pt.store(engine)))
    model.store, model.engine = model.inner.store, engine
    deployed = pt.materialized(model)
    assert (deployed.store, deployed.engine) == (None, None)
    torch.save(deployed, io.BytesIO())


def test_a_model_in_ddp_or_compiled_is_materialized(tmp_path):
    model = torch.nn.Sequential(pt.Embedding(8, 2, store=store_of()), torch.nn.Linear(2, 1))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        wrapped = Nested(torch.nn.parallel.DistributedDataParallel(model))
    finally:
        torch.distributed.destroy_process_group()
    ids = torch.tensor([5, 3])
    deployed = pt.materialized(wrapped)
    assert isinstance(deployed.inner, torch.nn.Sequential)
    for copy in (deployed, pt.materialized(torch.compile(model, backend="eager"))):
        assert torch.equal(copy(ids), model(ids))
        assert torch.equal(torch.export.export(copy, (ids,)).module()(ids), model(ids))


# ---- what is refused


@pytest.mark.parametrize("how", ["class", "attribute"])
def test_a_forward_of_the_users_own_is_refused(how):
    class Doubled(pt.EmbeddingBag):
        def forward(self, ids):
            return super().forward(ids) * 2

    bag = (Doubled if how == "class" else pt.EmbeddingBag)(8, 2, store=store_of())
    if how == "attribute":
        bag.forward = lambda ids: ids
    with pytest.raises(
        ps.UsageTypeError, match="replaces the forward of EmbeddingBag, which the copy would lack; call"
    ):
        pt.materialized(torch.nn.Sequential(bag))


def test_a_class_without_a_forward_of_its_own_is_materialized():
    class Named(pt.EmbeddingBag):
        pass

    bag = Named(8, 2, store=store_of())
    assert torch.equal(pt.materialized(bag)(torch.tensor([[5, 3]])), bag(torch.tensor([[5, 3]])))


def test_a_module_in_a_list_is_refused():
    model = torch.nn.Module()
    model.parts = [pt.Embedding(8, 2, store=store_of())]
    with pytest.raises(ps.UsageTypeError, match=r"materialized returns, .* torch\.nn\.ModuleList, but none in a list"):
        pt.materialized(model)


def test_a_closed_store_is_refused():
    store = store_of()
    embedding = pt.Embedding(8, 2, store=store)
    store.close()
    with pytest.raises(ps.UsageError, match="this store is closed"):
        pt.materialized(embedding)


# ---- over a service


@pytest.mark.parametrize("every", [None, 1000])
def test_tables_of_a_service_that_never_rests_are_of_one_step(every, tmp_path, monkeypatch):
    tables = [
        ps.TableConfig(8, 2, ps.Constant(0.0), ps.SGD(1.0), name=name, dynamic=dynamic)
        for name, dynamic in (("user", None), ("item", None), ("page", ps.Dynamic(missing="zero")))
    ]
    engine = ps.Engine(ps.EmbeddingConfig.from_tables(tables))
    folder = None if every is None else tmp_path / "run"
    with service_of(engine, folder, every) as service, pt.store(service.address.uri) as store:
        parts = {table.name: pt.Embedding(8, 2, table=table.name, store=store) for table in tables}
        model = torch.nn.ModuleDict(parts)
        opt = pt.Step(model)

        def step():
            opt.zero_grad()
            sum(part(torch.tensor([5])).sum() for part in model.values()).backward()
            opt.step()

        def stepping(client, name):
            step()
            return table_of(client, name)

        step()
        table_of = Client.table
        monkeypatch.setattr(Client, "table", stepping)
        deployed = pt.materialized(model)
        rows = {name: part(torch.tensor([5])).tolist() for name, part in deployed.items()}
        assert rows["user"] == rows["item"] == rows["page"]
        assert rows["user"] in ([[-3.0, -3.0]], [[-4.0, -4.0]])
        assert deployed["page"](torch.tensor([6])).tolist() == [[0.0, 0.0]]
