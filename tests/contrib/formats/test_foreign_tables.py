"""Tables that other libraries write, in the ways that their users write them."""

import json
import zipfile
from functools import partial

import engines
import ml_dtypes
import numpy as np
import pytest

import penstock as ps

ROWS = np.random.default_rng(0).random((30, 4), np.float32)
LIBRARIES = pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves


engine_of = partial(engines.engine_of, tables=("user",), dim=4, rows=30)


def assert_read(path, rows=ROWS):
    """The rows of a table are those that were written. Returns what was loaded."""
    engine = engine_of()
    loaded = engine.read_tables(path)
    np.testing.assert_array_equal(engine.lookup("user", range(30)), rows)
    return loaded


def refusal(path):
    with pytest.raises(ps.InputError) as caught:
        engine_of().read_tables(path)
    return str(caught.value)


# ---- Orbax


@pytest.fixture(scope="module")
def orbax():
    return pytest.importorskip("orbax.checkpoint", reason="an extra: pip install 'penstock[orbax]'")


def standard(orbax, path, tree):
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


@LIBRARIES
def test_trees_of_orbax_are_named_by_their_paths(tmp_path, orbax):
    import jax

    tree = {
        "params": {"encoder": {"user": {"embedding": jax.numpy.asarray(ROWS)}}, "layers": [ROWS[:2], {"x": ROWS[0]}]},
        "step": 3,
        "name": "abc",
        "nothing": None,
    }
    for number, use_ocdbt in enumerate((True, False)):
        with orbax.PyTreeCheckpointer(use_ocdbt=use_ocdbt) as checkpointer:
            checkpointer.save(tmp_path / str(number), tree)
        loaded = assert_read(tmp_path / str(number))
        assert loaded.tables == {"user": {"parameters": "params/encoder/user/embedding"}}
        assert loaded.skipped["step"] == "a single number"
        assert loaded.skipped["name"] == "no array"
        assert {"params/layers/0", "params/layers/1/x"} <= loaded.skipped.keys()
    standard(orbax, tmp_path / "flat", {"user": ROWS})
    assert_read(tmp_path / "flat")


@LIBRARIES
def test_an_array_that_lay_on_other_devices_is_read(tmp_path, orbax, mesh_of):
    import jax

    sharding = jax.sharding.NamedSharding(mesh_of(2), jax.sharding.PartitionSpec("shard"))
    standard(orbax, tmp_path / "c", {"a": {"user": jax.device_put(ROWS, sharding)}})
    assert_read(tmp_path / "c")


@LIBRARIES
def test_the_state_of_nnx_and_its_optimizer(tmp_path, orbax):
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.user = nnx.Embed(30, 4, rngs=rngs)
            self.dense = nnx.Linear(4, 2, rngs=rngs)

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    standard(orbax, tmp_path / "c", {"model": nnx.state(model), "opt": nnx.state(optimizer)})
    engine = engine_of(ps.Adam(0.1))
    loaded = engine.read_tables(tmp_path / "c")
    assert loaded.tables == {
        "user": {
            "parameters": "model/user/embedding/value",
            "momenta": "opt/opt_state/0/mu/user/embedding/value",
            "velocities": "opt/opt_state/0/nu/user/embedding/value",
        }
    }
    np.testing.assert_array_equal(engine.lookup("user", range(30)), model.user.embedding[...])


@LIBRARIES
def test_folders_of_a_checkpoint_manager_name_their_steps(tmp_path, orbax):
    args = orbax.args
    with orbax.CheckpointManager(tmp_path / "manager") as manager:
        for step in (2, 10):
            items = {"state": args.StandardSave({"user": ROWS}), "other": args.StandardSave({"a": ROWS})}
            manager.save(step, args=args.Composite(**items, extra=args.JsonSave({"epoch": 3})))
    folder = tmp_path / "manager"
    assert f"manager: holds an Orbax checkpoint in 2, 10; give what to read: {folder / '10'}" in refusal(folder)
    loaded = assert_read(folder / "10")
    assert loaded.tables == {"user": {"parameters": "state/user"}}
    assert loaded.skipped["extra"] == "no tree of arrays"
    assert_read(folder / "2" / "state")
    (folder / "10").rename(tmp_path / "10.orbax-checkpoint-tmp-7")
    assert "an Orbax checkpoint that was not completed" in refusal(tmp_path / "10.orbax-checkpoint-tmp-7")


@LIBRARIES
def test_a_missing_chunk_of_orbax_is_damage(tmp_path, orbax):
    with orbax.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "c", {"user": ROWS})
    (tmp_path / "c" / "user" / "0.0").unlink()
    assert refusal(tmp_path / "c").endswith(" is missing; it is damaged or incomplete")
    (tmp_path / "c" / "_METADATA").write_text("{")
    assert "Orbax finds no metadata of its arrays; copy the whole folder again" in refusal(tmp_path / "c")


# ---- safetensors


@pytest.fixture(scope="module")
def save_file():
    return pytest.importorskip("safetensors.numpy", reason="an extra").save_file


def folder_of_shards(path, save_file, index=True):
    path.mkdir()
    save_file({"model.user.weight": ROWS}, path / "model-00001-of-00002.safetensors")
    save_file({"model.bias": ROWS[0]}, path / "model-00002-of-00002.safetensors")
    names = {"model.user.weight": "model-00001-of-00002.safetensors", "model.bias": "model-00002-of-00002.safetensors"}
    if index:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (path / "config.json").write_text("{}")
    return path


def test_folders_of_hugging_face(tmp_path, save_file):
    for index in (True, False):
        loaded = assert_read(folder_of_shards(tmp_path / f"hf{index}", save_file, index))
        assert loaded.tables == {"user": {"parameters": "model.user.weight"}}
    (tmp_path / "one").mkdir()
    save_file({"user.weight": ROWS}, tmp_path / "one" / "model.safetensors")
    assert_read(tmp_path / "one")


def test_a_folder_of_links_as_in_the_cache_of_the_hub(tmp_path, save_file):
    folder = folder_of_shards(tmp_path / "blobs", save_file)
    snapshot = tmp_path / "snapshots" / "a1b2"
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert_read(snapshot)


def test_a_folder_of_hugging_face_that_lacks_a_shard_or_refers_elsewhere(tmp_path, save_file):
    folder = folder_of_shards(tmp_path / "hf", save_file)
    (folder / "model-00001-of-00002.safetensors").rename(tmp_path / "moved.safetensors")
    assert "hf: 'model-00001-of-00002.safetensors' is missing; copy the whole folder" in refusal(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"user": "../moved.safetensors"}}))
    assert "refers to '../moved.safetensors', outside its folder; nothing was loaded" in refusal(folder)
    index.write_text("{}")
    assert "model.safetensors.index.json: no index of safetensors: 'weight_map'" in refusal(folder)


def test_types_that_no_table_has_are_refused_by_name(tmp_path, save_file):
    save_file({"user.weight": ROWS.astype(np.int8)}, tmp_path / "m.safetensors")
    assert "expected floats of type float16, bfloat16, float32, float64, got I8" in refusal(tmp_path / "m.safetensors")


# ---- torch


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="an extra: pip install 'penstock[torch]'")


class NoModule:
    """Stands for a class of the user."""

    def __init__(self, **state):
        self.__dict__.update(state)


def test_numbers_and_arrays_of_numpy_in_a_file_of_torch(tmp_path, torch):
    state = {"user.weight": torch.from_numpy(ROWS)}
    more = {"epoch": np.int64(3), "loss": np.float32(0.5), "best": np.bool_(True), "curve": np.arange(3.0)}
    torch.save({"model": state, **more}, tmp_path / "m.pt")
    loaded = assert_read(tmp_path / "m.pt")
    assert loaded.tables == {"user": {"parameters": "model.user.weight"}}
    assert loaded.skipped["epoch"] == "no dense tensor, but int64"
    torch.save({"user": ROWS}, tmp_path / "n.pt")  # an array of NumPy as the table
    assert_read(tmp_path / "n.pt")


def test_an_object_in_a_file_of_torch_is_named_by_its_key(tmp_path, torch):
    file = tmp_path / "m.pt"
    state = {"user.weight": torch.from_numpy(ROWS)}
    torch.save({"model": state, "args": {"lr": 0.1, "config": NoModule(a=1)}, "epoch": 3}, file)
    text = refusal(file)
    assert "'args.config' is an object of " in text
    assert (
        "NoModule, whose class penstock does not load: only tensors, plain data and NumPy's; the file also has mo"
        in text
    )
    advice = text[text.index("torch.save(torch.load(") :].replace("NEW)", f"{str(tmp_path / 'new.pt')!r})")
    exec(advice, {"torch": torch})
    assert_read(tmp_path / "new.pt")


def test_a_whole_module_is_refused_with_the_way_to_its_state(tmp_path, torch):
    torch.save(torch.nn.EmbeddingBag(30, 4), tmp_path / "m.pt")
    text = refusal(tmp_path / "m.pt")
    assert "a whole object of torch.nn.modules.sparse.EmbeddingBag, such as a torch.nn.Module, whose class" in text
    assert text.endswith("weights_only=False).state_dict(), NEW)")


def test_an_archive_of_torchscript_is_refused_with_the_way_to_its_state(tmp_path, torch):
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        for name, content in {"data.pkl": ".", "version": "3", "constants.pkl": "."}.items():
            archive.writestr(f"m/{name}", content)
    advice = "a TorchScript archive, of torch.jit.save; save its state_dict: torch.save(torch.jit.load("
    assert advice in refusal(tmp_path / "m.pt")


@LIBRARIES
def test_kinds_of_tensors_of_torch(tmp_path, torch):
    rows = torch.from_numpy(ROWS)
    quantized = torch.quantize_per_tensor(rows, 0.1, 0, torch.qint8)
    for kind, tensor, way in (
        ("sparse_coo", rows.to_sparse(), "to_dense()"),
        ("sparse_csr", rows.to_sparse_csr(), "to_dense()"),
        ("quantized", quantized, "dequantize()"),
    ):
        torch.save({"user.weight": tensor}, tmp_path / kind)
        text = refusal(tmp_path / kind)
        assert text.endswith(f"'user.weight' is a {kind} tensor; save it after {way}")
    torch.save(rows, tmp_path / "user.pt")  # a tensor alone has the name of the file
    assert_read(tmp_path / "user.pt")
    torch.save({"user.weight": rows}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert_read(tmp_path / "old.pt")


@LIBRARIES
def test_tensors_of_torch_that_numpy_does_not_take(tmp_path):
    torch = pytest.importorskip("torch", reason="an extra: pip install 'penstock[torch]'")
    negative = torch._neg_view(torch.from_numpy(-ROWS))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save({"user.weight": negative, "a": nested, "b": torch.empty(2, 4, device="meta")}, tmp_path / "m.pt")
    skipped = assert_read(tmp_path / "m.pt").skipped
    assert skipped["a"] == "a nested tensor; save it after to_padded_tensor()"
    assert skipped["b"] == "a tensor on torch's meta device, which has no values"
    rows = torch.from_numpy(ROWS)
    torch.save({"a": {"user": {"weight": rows}}, "a.user": {"weight": rows + 1}}, tmp_path / "m.pt")
    assert "'a.user.weight' is two of its tensors" in refusal(tmp_path / "m.pt")


# ---- Keras


def test_a_model_file_of_keras_has_its_weights(tmp_path):
    h5py = pytest.importorskip("h5py", reason="an extra: pip install 'penstock[keras]'")
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file["layers/embedding/vars/0"] = ROWS
        file["layers/embedding/vars"].attrs["name"] = "user"
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
        archive.writestr("config.json", "{}")
        archive.write(tmp_path / "w.h5", "model.weights.h5")
    loaded = assert_read(tmp_path / "m.keras")
    assert loaded.tables == {"user": {"parameters": "layers/user/vars/0"}}
    whole = (tmp_path / "m.keras").read_bytes()
    (tmp_path / "m.keras").write_bytes(whole[: len(whole) // 2])
    assert refusal(tmp_path / "m.keras").endswith("it is damaged or incomplete")
    index = {"weight_map": {"/layers/embedding/vars": ["w.h5"]}}
    (tmp_path / "m.weights.json").write_text(json.dumps(index))
    assert_read(tmp_path / "m.weights.json")


def test_bfloat16_of_keras(tmp_path):
    """HDF5 has no such type: Keras stores two bytes, and names it in an attribute."""
    h5py = pytest.importorskip("h5py", reason="an extra: pip install 'penstock[keras]'")
    rows = ROWS.astype(ml_dtypes.bfloat16)
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        file["layers/user/vars/0"] = rows.view("V2")
        file["layers/user/vars/0"].attrs["dtype"] = "bfloat16"
    assert_read(tmp_path / "m.weights.h5", rows.astype(np.float32))
