"""The modules next to torch's: results, gradients, arguments, errors, and what a state_dict contains."""

import copy
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch_models import BagConfig, KeyedJagged, engine_of, store_of, zipf_batch  # noqa: E402

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402

IDS, OFFSETS = torch.tensor([5, 3, 5, 49]), torch.tensor([0, 2, 2])


@pytest.fixture
def engine():
    return engine_of()


@pytest.fixture
def store(engine):
    return pt.store(engine)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("arguments", [{}, {"include_last_offset": True}, {"padding_idx": 5}, {"padding_idx": -1}])
@pytest.mark.promise("Modules for torch have torch's results and gradients")
def test_a_bag_has_torchs_results_and_gradients(mode, arguments, store, engine):
    bag = pt.EmbeddingBag(50, 4, mode=mode, store=store, **arguments)
    twin = bag.materialize()
    offsets = torch.tensor([0, 2, 2, 4]) if arguments.get("include_last_offset") else OFFSETS
    result, expected = bag(IDS, offsets), twin(IDS, offsets)
    assert torch.equal(result, expected)
    before = engine.retrieve_parameters("user")["parameters"]
    (result**2).sum().backward()
    (expected**2).sum().backward()
    pt.Step(bag).step()
    moved = before - 0.1 * twin.weight.grad.numpy()
    np.testing.assert_allclose(engine.retrieve_parameters("user")["parameters"], moved, rtol=1e-6)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 2), (0,)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint16, torch.uint32, torch.uint64])
def test_an_embedding_takes_ids_of_any_shape_and_integer_type(shape, dtype, store):
    embedding = pt.Embedding(50, 4, store=store)
    ids = torch.arange(int(np.prod(shape))).reshape(shape) % 3
    assert torch.equal(embedding(ids.to(dtype)), embedding.materialize()(ids))


@pytest.mark.parametrize("kind", ["sum", "mean", "single"])
def test_gradients_scaled_by_frequency_are_divided_by_the_counts_of_their_ids(kind, store, engine):
    arguments = {"scale_grad_by_freq": True, "store": store}
    module = pt.Embedding(50, 4, **arguments) if kind == "single" else pt.EmbeddingBag(50, 4, mode=kind, **arguments)
    opt = pt.Step(module)
    ids, before = [0, 0, 5, 5, 9, 1], engine.lookup("user", [0, 5, 9, 1, 2])
    for _ in range(2):
        module(torch.tensor([ids])).sum().backward()
    opt.step()
    step = 2 * 0.1 * (1 / 6 if kind == "mean" else 1)
    moved = before - np.array([[step]] * 4 + [[0]], np.float32)
    np.testing.assert_allclose(engine.lookup("user", [0, 5, 9, 1, 2]), moved, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="max mode does not support scaling the gradient by the frequency"):
        pt.EmbeddingBag(50, 4, mode="max", **arguments)


def test_a_padding_row_reads_as_zeros_and_never_moves():
    engine = engine_of(optimizer=ps.Adam(0.1))
    embedding = pt.Embedding(50, 4, padding_idx=3, store=pt.store(engine))
    before = engine.lookup("user", [3, 5])
    opt = pt.Step(embedding)
    for _ in range(3):
        rows = embedding(torch.tensor([3, 5, 3]))
        assert not rows[0].any()
        rows.sum().backward()
        opt.step()
    after = engine.lookup("user", [3, 5])
    assert np.array_equal(before[0], after[0])
    assert not np.array_equal(before[1], after[1])


def test_a_batch_of_only_padding_or_no_ids_pushes_nothing(store):
    bag = pt.EmbeddingBag(50, 4, padding_idx=3, store=store)
    opt = pt.Step(bag)
    for ids in (torch.tensor([3, 3]), torch.zeros(0, dtype=torch.int64)):
        pooled = bag(ids, torch.tensor([0, 0]))
        assert not pooled.any()
        pooled.sum().backward()
        opt.step()
    assert opt.report == (0, 0, 0, 0)


def test_gradients_reach_per_sample_weights(store):
    bag = pt.EmbeddingBag(50, 4, mode="sum", store=store)
    twin = bag.materialize()
    weights = [torch.tensor([0.5, 1.0, 2.0, 3.0], requires_grad=True) for _ in range(2)]
    for module, weight in zip((bag, twin), weights, strict=True):
        (module(IDS, OFFSETS, weight) ** 2).sum().backward()
    torch.testing.assert_close(weights[0].grad, weights[1].grad)


def test_modules_look_like_torchs(store):
    model = torch.nn.Sequential(pt.EmbeddingBag(50, 4, padding_idx=3, store=store), torch.nn.Linear(4, 1))
    assert "(0): EmbeddingBag(50, 4, padding_idx=3, mode='mean', table='user')" in repr(model)
    assert repr(pt.Embedding(50, 4, store=store)) == "Embedding(50, 4, table='user')"
    bags = pt.EmbeddingBagCollection(tables=[BagConfig("user", 50, 4, ["clicked"])], store=store)
    assert "(user): 50, 4, features=['clicked']" in repr(bags)
    assert repr(bags({"clicked": (IDS, [0, 2, 4])})) == "KeyedTensor({'clicked': (2, 4)})"
    assert [name for name, _ in model.named_parameters()] == ["1.weight", "1.bias"]
    assert list(model[0].buffers()) == []


def test_errors_have_torchs_words_or_name_the_table(store):
    bag, embedding = pt.EmbeddingBag(50, 4, store=store), pt.Embedding(50, 4, store=store)
    for wrong, words in [
        (lambda: bag(torch.tensor([1.0])), "scalar types: Long, Int; but got torch.FloatTensor"),
        (lambda: embedding([1]), "must be Tensor, not list"),
        (lambda: bag(torch.tensor([1, 50]), torch.tensor([0])), "50.*user|user.*50"),
        (lambda: bag(torch.tensor([1])), "offsets has to be a 1D Tensor but got None"),
        (lambda: bag(torch.tensor([[1]]), torch.tensor([0])), "if input is 2D, then offsets has to be None"),
        (lambda: bag(IDS, OFFSETS + 0.5), "'offsets' .* scalar types: Long, Int; but got torch.FloatTensor"),
        (lambda: bag(IDS, OFFSETS.tolist()), "argument 'offsets' must be Tensor, not list"),
        (lambda: bag(IDS, OFFSETS, torch.ones(3)), "it must have the same shape as the input"),
        (lambda: bag(IDS, OFFSETS, torch.ones(4)), "only supported for mode='sum'"),
        (lambda: pt.EmbeddingBag(50, 4, mode="all", store=store), "mode has to be one of sum, mean or max"),
        (lambda: pt.Embedding(50, 4, padding_idx=50, store=store), "padding_idx must be within num_embeddings"),
        (lambda: pt.Embedding(50, 4, max_norm=1.0, store=store), "a lookup changes no row"),
        (lambda: pt.Embedding(50, 5, store=store), "table 'user': its dim is 4, got embedding_dim=5"),
        (lambda: pt.Embedding(60, 4, store=store), "its vocabulary_size is 50, got num_embeddings=60"),
        (lambda: pt.Embedding(50, 4, table="item", store=store), "no table 'item'; expected one of user"),
        (lambda: pt.Embedding(50, 4, store=3), "store: expected what penstock.torch.store returns, got int"),
        (lambda: pt.store(3), "expected an Engine or the address of a service, got int"),
        (lambda: pt.store("localhost:1"), "expected an address such as grpc://127.0.0.1:8815"),
    ]:
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=words):
            wrong()


def test_eval_and_no_grad_read_and_record_nothing(store):
    bag = pt.EmbeddingBag(50, 4, store=store)
    opt = pt.Step(bag)
    assert not bag.eval()(IDS, OFFSETS).requires_grad
    with torch.no_grad():
        bag.train()(IDS, OFFSETS)
    with torch.inference_mode():
        bag(IDS, OFFSETS)
    assert not store.pending
    opt.step()
    assert opt.report.applied == 0


@pytest.mark.parametrize("kind", [pt.EmbeddingBag, pt.Embedding])
def test_a_missing_weight_is_explained(kind, store):
    module = kind(50, 4, store=store)
    assert not hasattr(module, "weight")
    with pytest.raises(AttributeError, match=r"no weight: its rows are in table 'user'; materialize.*load_param"):
        torch.nn.init.zeros_(module.weight)
    with pytest.raises(AttributeError, match="has no attribute 'weights'"):
        _ = module.weights


def test_a_frozen_module_keeps_its_rows_in_training(store, engine):
    bag = pt.EmbeddingBag(50, 4, store=store).requires_grad_(False)
    model, before = torch.nn.Sequential(bag, torch.nn.Linear(4, 1)), engine.lookup("user", [5])
    opt = pt.Step(model)
    for is_trained in (False, True):
        bag.requires_grad_(is_trained)
        model.train()(IDS[None]).sum().backward()
        opt.step()
        assert opt.report.applied == is_trained
        assert np.array_equal(engine.lookup("user", [5]), before) != is_trained


def test_pickles_and_copies_are_refused_with_the_reason(store):
    bag = pt.EmbeddingBag(50, 4, store=store)
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"cannot pickle or copy 'EmbeddingBag': its rows are in Store\(Engine"):
            copied(torch.nn.Sequential(bag))
        with pytest.raises(TypeError, match=r"cannot pickle or copy Store\(Engine.*: open one with penstock.torch"):
            copied(pt.Step(bag))


def test_a_materialized_module_is_torchs_with_the_same_rows(store, engine):
    twin = copy.deepcopy(pt.EmbeddingBag(50, 4, padding_idx=2, store=store).materialize())
    assert type(twin) is torch.nn.EmbeddingBag
    assert twin.padding_idx == 2
    np.testing.assert_array_equal(twin.weight.detach(), engine.retrieve_parameters("user")["parameters"])
    dynamic = ps.TableConfig(8, 4, name="user", optimizer=ps.SGD(0.1), dynamic=ps.Dynamic())
    keyed = pt.Embedding(8, 4, store=pt.store(ps.Engine(ps.EmbeddingConfig.from_tables([dynamic]))))
    with pytest.raises(ps.UsageError, match="table 'user' is dynamic"):
        keyed.materialize()


def test_a_dynamic_table_takes_any_key():
    dynamic = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), name="user", dynamic=ps.Dynamic())
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([dynamic]))
    embedding = pt.Embedding(8, 2, store=pt.store(engine))
    opt = pt.Step(embedding)
    embedding(torch.tensor([2**40, -7])).sum().backward()
    opt.step()
    assert embedding(torch.tensor([-7])).tolist() == [[0.5, 0.5]]
    assert engine.keys("user").to_pylist() == [-7, 2**40]


@pytest.mark.parametrize("padding", [-1, 2**40])
def test_the_padding_of_a_dynamic_table_is_a_key(padding):
    """-1 is no row counted from the end, and no other key reads as zeros."""
    dynamic = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), name="user", dynamic=ps.Dynamic())
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([dynamic]))
    embedding = pt.Embedding(8, 2, padding_idx=padding, store=pt.store(engine))
    opt = pt.Step(embedding)
    rows = embedding(torch.tensor([padding, 7]))
    assert rows.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    rows.sum().backward()
    opt.step()
    assert engine.keys("user").to_pylist() == [7]


def test_a_state_dict_refers_to_the_tables(store, engine, tmp_path):
    model = torch.nn.Sequential(pt.EmbeddingBag(50, 4, store=store), torch.nn.Linear(4, 1))
    opt = pt.Step(model)
    model(IDS[None]).sum().backward()
    opt.step()
    engine.save(tmp_path / "run")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert set(state) == {"0._extra_state", "1.weight", "1.bias"}
    assert state["0._extra_state"]["version"] == "1"

    restored = ps.Engine.restore(tmp_path / "run")
    again = torch.nn.Sequential(pt.EmbeddingBag(50, 4, store=pt.store(restored)), torch.nn.Linear(4, 1))
    again.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(again(IDS[None]), model(IDS[None]))

    model(IDS[None]).sum().backward()
    opt.step()
    with pytest.raises(ps.StateError, match="expected tables at step 1, got step 2; save the engine"):
        model.load_state_dict(state)


def test_no_tensor_has_a_tables_size():
    """The table has 10 GB, of which the pages of rows in use take memory."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            tensors = [each for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
            self.numel = max([self.numel, *(each.untyped_storage().nbytes() // 4 for each in tensors)])
            return result

    rows, dim = 1_000_000, 8
    store = store_of(("user", rows, dim), optimizer=ps.Adagrad(0.1))
    bags = pt.EmbeddingBagCollection(tables=[BagConfig("user", rows, dim, ["clicked"])], store=store)
    opt = pt.Step(bags)
    ids, offsets = zipf_batch(np.random.default_rng(0), 64, rows)
    with Largest() as largest:
        for _ in range(2):
            bags({"clicked": (ids, offsets)}).values().sum().backward()
            opt.step()
    assert 0 < largest.numel <= len(ids) * dim


# ---- collections


CONFIGS = [
    BagConfig("user", 50, 4, ["clicked", "bought"], "SUM"),
    BagConfig("item", 20, 4, ["seen"], "SUM"),
    BagConfig("shop", 9, 3, ["seen"], "MEAN"),
]


@pytest.fixture
def tables():
    return engine_of(("user", 50, 4), ("item", 20, 4), ("shop", 9, 3))


def keyed(weights=None):
    lengths = torch.tensor([2, 0, 1, 1, 3, 0])
    return KeyedJagged(["clicked", "bought", "seen"], torch.tensor([5, 3, 5, 49, 8, 2, 8]), lengths, weights)


def pairs(features):
    offsets, values = features.offsets(), features.values()
    ends = offsets[::2].tolist()
    return {
        key: (values[begin:end], offsets[2 * number : 2 * number + 3] - begin)
        for number, (key, begin, end) in enumerate(zip(features.keys(), ends[:-1], ends[1:], strict=True))
    }


def test_a_collection_pools_every_feature_as_torch_does(tables):
    bags = pt.EmbeddingBagCollection(tables=CONFIGS, store=pt.store(tables))
    twins, features = bags.materialize(), keyed()
    pooled, from_pairs = bags(features), bags(pairs(features))
    assert pooled.keys() == ["clicked", "bought", "seen@item", "seen@shop"]
    assert pooled.length_per_key() == [4, 4, 4, 3]
    assert pooled.offset_per_key() == [0, 4, 8, 12, 15]
    table_of = {"clicked": "user", "bought": "user", "seen@item": "item", "seen@shop": "shop"}
    for name, tensor in pooled.to_dict().items():
        expected = twins[table_of[name]](*pairs(features)[name.partition("@")[0]])
        torch.testing.assert_close(tensor, expected)
        assert torch.equal(tensor, from_pairs[name])
    assert torch.equal(pooled.values(), torch.cat(list(pooled.to_dict().values()), 1))


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("is_keyed", [False, True])
def test_a_batch_of_no_samples_is_pooled_to_no_rows(is_weighted, is_keyed, tables):
    configs = CONFIGS[:2] if is_weighted else CONFIGS
    bags = pt.EmbeddingBagCollection(tables=configs, is_weighted=is_weighted, store=pt.store(tables))
    no_ids, weights = torch.zeros(0, dtype=torch.int64), torch.zeros(0) if is_weighted else None
    names = ["clicked", "bought", "seen"]
    features = {name: (no_ids, [0], weights) for name in names}
    if is_keyed:
        features = KeyedJagged(names, no_ids, no_ids, weights)
    pooled, opt = bags(features), pt.Step(bags)
    assert pooled.values().shape == (0, sum(pooled.length_per_key()))
    assert pooled["clicked"].shape == (0, 4)
    pooled.values().sum().backward()
    opt.step()
    assert opt.report.applied == 0
    single = pt.EmbeddingCollection(tables=CONFIGS[:2], store=bags.store)(features)["seen"]
    assert (single.values().shape, single.lengths().tolist(), single.to_dense()) == ((0, 4), [], [])
    assert single.to_padded_dense().shape == (0, 0, 4)


def test_results_have_torchrecs_methods(tables):
    """As torchrec documents them; its package is not needed."""
    store = pt.store(tables)
    pooled = pt.EmbeddingBagCollection(tables=CONFIGS, store=store)(keyed())
    assert (pooled.key_dim(), pooled.device()) == (1, torch.device("cpu"))
    assert torch.equal(pooled.to(torch.device("cpu"))["bought"], pooled["bought"])
    groups = [["seen@shop", "clicked"], ["bought"]]
    first, second = pt.KeyedTensor.regroup([pooled], groups)
    assert torch.equal(first, torch.cat([pooled["seen@shop"], pooled["clicked"]], 1))
    assert torch.equal(second, pooled["bought"])
    assert torch.equal(pt.KeyedTensor.regroup_as_dict([pooled], groups, ["a", "b"])["a"], first)
    with pytest.raises(KeyError, match="no feature 'seen'; expected one of clicked, bought, seen@item, seen@shop"):
        pt.KeyedTensor.regroup([pooled], [["seen"]])
    with pytest.raises(ps.UsageError, match="Groups and keys should have same length"):
        pt.KeyedTensor.regroup_as_dict([pooled], groups, ["a"])

    embeddings = pt.EmbeddingCollection(tables=CONFIGS[:2], store=store)
    assert (embeddings.embedding_dim(), embeddings.need_indices(), embeddings.device.type) == (4, False, "cpu")
    assert embeddings.embedding_names_by_table() == [["clicked", "bought"], ["seen"]]
    jagged = embeddings(keyed())["seen"]
    assert torch.equal(jagged.lengths_or_none(), torch.tensor([3, 0]))
    assert torch.equal(jagged.offsets_or_none(), torch.tensor([0, 3, 3]))
    assert (jagged.weights_or_none(), jagged.to_dense_weights(), jagged.to_padded_dense_weights()) == (None,) * 3
    with pytest.raises(ValueError, match="doesn't have weights"):
        jagged.weights()
    values = jagged.values()
    assert torch.equal(jagged.to_padded_dense()[0], values)
    padded = jagged.to_padded_dense(4, padding_value=7.0)
    assert padded.shape == (2, 4, 4)
    assert torch.equal(padded[0, :3], values)
    assert (padded[0, 3:] == 7).all()
    assert (padded[1] == 7).all()
    assert torch.equal(jagged.to(torch.device("cpu")).to_padded_dense(2)[0], values[:2])
    opt, before = pt.Step(embeddings), tables.lookup("item", [8, 2])
    jagged.to_padded_dense(2).sum().backward()  # rows 8 and 2 once each
    opt.step()
    np.testing.assert_allclose(tables.lookup("item", [8, 2]), before - np.float32(0.1), rtol=1e-5)

    with_ids = pt.EmbeddingCollection(tables=CONFIGS[:2], need_indices=True, store=store)(keyed())["seen"]
    assert with_ids.weights().tolist() == [8, 2, 8]
    assert [part.tolist() for part in with_ids.to_dense_weights()] == [[8, 2, 8], []]
    assert with_ids.to_padded_dense_weights(2, -1).tolist() == [[8, 2], [-1, -1]]


def test_weights_of_a_collection_scale_rows_and_get_gradients(tables):
    weights = torch.tensor([0.5, 1.0, 2.0, 3.0, 1.0, 1.0, 1.0], requires_grad=True)
    configs = [CONFIGS[0], CONFIGS[1]]
    bags = pt.EmbeddingBagCollection(tables=configs, is_weighted=True, store=pt.store(tables))
    rows = tables.lookup("user", [5, 3])
    pooled = bags(keyed(weights))
    np.testing.assert_allclose(pooled["clicked"][0].detach(), 0.5 * rows[0] + rows[1], rtol=1e-6)
    pooled.values().sum().backward()
    np.testing.assert_allclose(weights.grad[0], rows[0].sum(), rtol=1e-5)
    with pytest.raises(ps.UsageError, match="feature 'clicked': is_weighted=True needs weights"):
        bags(keyed())


def test_weights_of_a_feature_are_not_those_of_the_next_one(tables):
    """One too few and one too many are as many weights as ids."""
    configs = [BagConfig("user", 50, 4, ["clicked", "bought"])]
    bags = pt.EmbeddingBagCollection(tables=configs, is_weighted=True, store=pt.store(tables))
    offsets = torch.tensor([0, 1, 2])
    features = {name: (IDS[:2], offsets, torch.ones(size)) for name, size in (("clicked", 1), ("bought", 3))}
    with pytest.raises(ps.UsageError, match=r"feature 'clicked': expected weights of shape \(2,\), .* got \(1,\)"):
        bags(features)


def test_a_collection_of_single_embeddings_returns_them_by_sample(tables):
    embeddings = pt.EmbeddingCollection(tables=CONFIGS[:2], store=pt.store(tables))
    result, twins = embeddings(keyed()), embeddings.materialize()
    assert list(result) == ["clicked", "bought", "seen"]
    assert [part.tolist() for part in result["seen"].to_dense()] == [
        twins["item"](torch.tensor(ids, dtype=torch.int64)).tolist() for ids in ([8, 2, 8], [])
    ]
    assert result["bought"].lengths().tolist() == [1, 1]
    opt = pt.Step(embeddings)
    result["seen"].values().sum().backward()
    opt.step()
    assert opt.report.applied == 1


def test_errors_of_a_collection_name_the_feature(tables):
    store = pt.store(tables)
    bags = pt.EmbeddingBagCollection(tables=CONFIGS, store=store)
    good = pairs(keyed())
    for features, words in [
        ({**good, "seen": (IDS, [0, 2])}, r"feature 'seen': expected .* ascend from 0 to 4, the .*; got 0 to 2"),
        ({**good, "seen": (IDS, [0, 5, 4])}, "feature 'seen': .*; got 4 after 5"),
        ({**good, "seen": (IDS, [-1, 2, 4])}, "feature 'seen': .*; got -1 to 4"),
        ({**good, "seen": (IDS, [0.0, 2.0, 4.0])}, "feature 'seen': expected integer offsets .*; got torch.float32"),
        ({**good, "seen": (IDS, [[0, 4]])}, r"feature 'seen': .*; got shape \(1, 2\)"),
        ({**good, "seen": (IDS * 1.0, [0, 2, 4])}, "feature 'seen': Expected .* Long, Int; but got torch.FloatTensor"),
        (KeyedJagged(["clicked"], IDS, torch.tensor([5, -1])), "features: expected .*; got 4 after 5"),
        (KeyedJagged(["clicked"], IDS, torch.tensor([2, 1])), "features: .* ascend from 0 to 4, .*; got 0 to 3"),
        (KeyedJagged(["clicked", "seen"], IDS, torch.tensor([2, 1, 1])), "for each of 2 keys, got 3 lengths in all"),
        ({**good, "seen": IDS}, r"feature 'seen': expected \(values, offsets\)"),
        ({"clicked": good["clicked"]}, "features: no 'bought'; got clicked"),
        ({**good, "bought": (IDS, [0, 4])}, "the same number of samples in each"),
        (3, "features: expected a KeyedJaggedTensor, or a dict"),
    ]:
        with pytest.raises(ps.UsageError, match=words):
            bags(features)
    for configs, words in [
        ([CONFIGS[0], CONFIGS[0]], "Duplicate table name user"),
        ([], "at least one configuration"),
        ([BagConfig("user", 50, 4, ["a"], "MAX")], "expected pooling SUM or MEAN, got MAX"),
    ]:
        with pytest.raises(ps.UsageError, match=words):
            pt.EmbeddingBagCollection(tables=configs, store=store)
    with pytest.raises(TypeError, match="table 'user': expected feature_names as a list, got 'clicked'"):
        pt.EmbeddingBagCollection(tables=[BagConfig("user", 50, 4, "clicked")], store=store)
    with pytest.raises(TypeError, match="dict has no name, num_embeddings, embedding_dim, feature_names"):
        pt.EmbeddingBagCollection(tables=[vars(CONFIGS[0])], store=store)


def test_a_module_in_double_precision_computes_in_it_and_pushes_float32(store, engine):
    bag = pt.EmbeddingBag(50, 4, store=store).double()
    assert bag(IDS, OFFSETS).dtype == torch.float64
    assert bag.to(torch.float32)(IDS, OFFSETS).dtype == torch.float32
    opt = pt.Step(bag)
    bag.double()(IDS, OFFSETS).sum().backward()
    opt.step()
    assert opt.report.applied == 1


def test_a_feature_of_several_tables_is_listed_by_the_error_for_its_bare_name(tables):
    configs = [BagConfig("user", 50, 4, ["seen"]), BagConfig("item", 20, 4, ["seen"])]
    bags = pt.EmbeddingBagCollection(tables=configs, store=pt.store(tables))
    with pytest.raises(KeyError, match="no feature 'seen'; expected one of seen@user, seen@item"):
        bags({"seen": (torch.tensor([5, 3]), [0, 2])})["seen"]
