"""Frozen rows: of a module, of some tables of a collection, and of a whole model."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from services import service_of  # noqa: E402
from torch_models import IDS, BagConfig, engine_of  # noqa: E402

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402

ROWS = 20
SIZES = [("user", ROWS, 4), ("item", ROWS, 4), ("shop", ROWS, 4)]
DIMS = [("user", ROWS, 4), ("item", ROWS, 4), ("shop", ROWS, 3)]


@pytest.fixture(params=[SIZES, DIMS], ids=["one tensor", "two tensors"])
def engine(request):
    """An engine of three tables, two or all of one dim."""
    return engine_of(*request.param, optimizer=ps.Adagrad(0.1))


@pytest.fixture(params=[pt.EmbeddingBagCollection, pt.EmbeddingCollection])
def collection(request, engine):
    """A collection of a feature per table, and its Step."""
    sizes = engine.config.sizes
    is_single = request.param is pt.EmbeddingCollection
    if is_single and len({dim for _, dim in sizes.values()}) > 1:
        sizes = {name: size for name, size in sizes.items() if name != "shop"}
    configs = [BagConfig(name, rows, dim, [f"of_{name}"]) for name, (rows, dim) in sizes.items()]
    return request.param(tables=configs, store=pt.store(engine))


def features_of(collection, seed=0):
    rng = np.random.default_rng(seed)
    offsets = torch.tensor([0, 2, 2, 5])
    return {f"of_{name}": (torch.from_numpy(rng.integers(0, ROWS, 5)), offsets) for name in collection._configs}


def tensors_of(collection, seed=0):
    """Feature → embeddings, of one forward pass."""
    result = collection(features_of(collection, seed))
    return _tensors(result)


def _tensors(result):
    return {name: part.values() for name, part in result.items()} if isinstance(result, dict) else result.to_dict()


def loss_of(tensors):
    return sum((tensor**2).sum() for tensor in tensors.values())


def train(collection, opt, seed=0):
    loss_of(tensors_of(collection, seed)).backward()
    opt.step()


def rows_of(engine):
    return {name: engine.retrieve_parameters(name)["parameters"] for name in engine.config.sizes}


def changed(engine, before):
    """The tables with another row than before."""
    return {name for name, rows in rows_of(engine).items() if not np.array_equal(rows, before[name])}


def test_frozen_tables_of_a_collection_keep_their_rows_and_the_others_train_as_before(collection, engine):
    assert collection.requires_grad_(False, tables=["user"]) is collection
    free = engine_of(*((name, *size) for name, size in engine.config.sizes.items()), optimizer=ps.Adagrad(0.1))
    other = type(collection)(tables=list(collection._configs.values()), store=pt.store(free))
    before = rows_of(engine)
    for module in (collection, other):
        opt = pt.Step(module)
        for seed in range(3):
            train(module, opt, seed)
    assert changed(engine, before) == set(collection._configs) - {"user"}
    for name in changed(engine, before):
        np.testing.assert_array_equal(rows_of(engine)[name], rows_of(free)[name])


def test_results_of_a_collection_do_not_depend_on_what_is_frozen(collection):
    expected = tensors_of(collection)
    for frozen in (["item"], ["user"], ["user", "item"], None):
        tensors = tensors_of(collection.requires_grad_(True).requires_grad_(False, tables=frozen))
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_a_table_is_trained_again_once_it_is_no_longer_frozen(collection, engine):
    before = rows_of(engine)
    collection.requires_grad_(False)
    collection.requires_grad_(True, tables=["item"])
    train(collection, pt.Step(collection))
    assert changed(engine, before) == {"item"}


def test_gradients_of_frozen_rows_are_in_no_norm(collection):
    opt = pt.Step(collection)
    collection.requires_grad_(False, tables=["user"])
    loss_of(tensors_of(collection)).backward()
    norm = opt.clip_grad_norm_(1.0)
    opt.zero_grad()
    tensors = tensors_of(collection.requires_grad_(True))
    del tensors["of_user"]
    loss_of(tensors).backward()
    torch.testing.assert_close(norm, opt.clip_grad_norm_(1.0))


@pytest.mark.parametrize("freezes_first", [False, True])
def test_prefetched_rows_are_frozen_as_their_forward_pass_finds_it(freezes_first, collection, engine):
    opt, before, features = pt.Step(collection), rows_of(engine), features_of(collection)
    if freezes_first:
        collection.requires_grad_(False, tables=["user"])
    collection.prefetch(features)
    if not freezes_first:
        collection._prefetched[1].result()
        collection.requires_grad_(False, tables=["user"])
    loss_of(_tensors(collection(features))).backward()
    opt.step()
    assert changed(engine, before) == set(collection._configs) - {"user"}


def test_a_table_that_a_collection_does_not_have_is_named_with_the_nearest(collection, engine):
    before = rows_of(engine)
    for tables, words in (
        (["item", "usr"], "requires_grad_: no table 'usr'; did you mean 'user'?"),
        (["item", "zzz"], "requires_grad_: no table 'zzz'; expected one of user, item"),
        (["item", 3], "requires_grad_: no table 3; expected one of user, item"),
        ("user", "requires_grad_: expected tables as a list of names, got 'user'"),
    ):
        with pytest.raises(ps.UsageError) as raised:
            collection.requires_grad_(False, tables=tables)
        assert str(raised.value).startswith(words)
    train(collection, pt.Step(collection))
    assert changed(engine, before) == set(collection._configs)  # nothing was frozen


def test_a_state_dict_does_not_contain_what_is_frozen(collection):
    state = collection.requires_grad_(False, tables=["user"]).state_dict()
    collection.requires_grad_(True).load_state_dict(state)
    assert tensors_of(collection)["of_user"].requires_grad


def test_a_model_is_frozen_with_its_rows():
    engine = engine_of(("user", 50, 4), optimizer=ps.SGD(0.5))
    store = pt.store(engine)
    bag, embedding = pt.EmbeddingBag(50, 4, store=store), pt.Embedding(50, 4, store=store)
    model = torch.nn.Sequential(torch.nn.Sequential(bag, torch.nn.Linear(4, 1)))
    parts, opt = torch.nn.ModuleList([model, embedding]), pt.Step(torch.nn.ModuleList([model, embedding]))
    assert pt.requires_grad_(parts, False) is parts
    assert not any(parameter.requires_grad for parameter in parts.parameters())
    assert not (model(IDS).sum() + embedding(IDS).sum()).requires_grad
    before = rows_of(engine)
    pt.requires_grad_(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    (model(IDS).sum() + embedding(torch.tensor([7])).sum()).backward()
    opt.step()
    after = rows_of(engine)["user"]
    (moved,) = (after != before["user"]).any(axis=1).nonzero()
    assert moved.tolist() == [3, 5, 49]  # not 7, which a frozen module has read
    pt.requires_grad_(embedding)
    assert embedding(torch.tensor([7])).requires_grad


def test_the_method_of_a_model_reaches_parameters_only():
    """As docs/torch.md says: torch looks for parameters, and rows are none."""
    bag = pt.EmbeddingBag(50, 4, store=pt.store(engine_of()))
    model = torch.nn.Sequential(bag, torch.nn.Linear(4, 1)).requires_grad_(False)
    assert model(IDS).requires_grad
    with pytest.raises(TypeError, match=r"requires_grad_: expected a torch.nn.Module, got list"):
        pt.requires_grad_([bag], False)


def frozen_engine(**more):
    """An engine whose table ``user`` is never trained, and ``item`` from the second step on."""
    user = ps.TableConfig(ROWS, 4, name="user", trainable=False, **more)
    item = ps.TableConfig(ROWS, 4, name="item", trainable=False, until_step=1)
    return ps.Engine(
        ps.EmbeddingConfig.from_tables([user, item, ps.TableConfig(ROWS, 4, name="shop")], ps.Adagrad(0.1))
    )


def collection_of(store):
    return pt.EmbeddingBagCollection(
        tables=[BagConfig(name, ROWS, 4, [f"of_{name}"]) for name in ("user", "item", "shop")], store=store
    )


def test_rows_of_a_table_that_the_configuration_freezes_get_no_gradient():
    engine = frozen_engine(on_gradient="refuse")
    collection, before = collection_of(pt.store(engine)), rows_of(engine)
    opt, tensors = pt.Step(collection), tensors_of(collection)
    assert {name for name, tensor in tensors.items() if tensor.grad_fn is not None} >= {"of_item", "of_shop"}
    train(collection, opt)
    assert changed(engine, before) == {"shop"}
    train(collection, opt)
    assert changed(engine, before) == {"item", "shop"}
    assert engine.gate.global_step == 2
    collection.requires_grad_(True)  # as of a whole model that a user thaws
    train(collection, opt)
    assert changed(engine, before) == {"item", "shop"}


def test_a_service_says_which_tables_are_frozen():
    with service_of(frozen_engine()) as service, pt.store(service.address.uri) as store:
        assert {name: info.is_frozen for name, info in store.tables.items()} == {
            "user": True, "item": False, "shop": False,
        }  # fmt: skip
        collection, before = collection_of(store), rows_of(service.engine)
        opt = pt.Step(collection)
        for seed in range(2):
            train(collection, opt, seed)
        assert changed(service.engine, before) == {"item", "shop"}
        assert not service.sequencer.counters.dropped["frozen:user"]


def test_a_table_that_its_configuration_freezes_is_not_thawed_with_the_model():
    """Else its gradients, which change nothing, would count in a clipped norm."""
    names = "word", "user"
    tables = [ps.TableConfig(50, 4, ps.Constant(1.0), name=name, trainable=name == "user") for name in names]
    store = pt.store(ps.Engine(ps.EmbeddingConfig.from_tables(tables, optimizer=ps.SGD(0.1))))
    model = torch.nn.ModuleDict({name: pt.Embedding(50, 4, table=name, store=store) for name in names})
    opt = pt.Step(model)
    for requires_grad in (False, True):
        pt.requires_grad_(model, requires_grad)
    (3 * model["word"](IDS) + 4 * model["user"](IDS[:1, :1])).sum().backward()
    assert opt.clip_grad_norm_(1.0) == 4 * 4 * 2  # the root of 4 squares of 16, as one id is added to 4
    assert [part.requires_grad for part in pt.materialized(model).parameters()] == [False, True]
