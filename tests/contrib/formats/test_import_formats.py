"""Checkpoints of TensorFlow and weights of Keras as sources of an import."""

import subprocess
import sys

import numpy as np
import pytest
from cli import table

CONFIG = (
    table("user", 60, 4) + table("item", 20, 4, "adam { beta1: 0.9 beta2: 0.99 epsilon: 1e-8 }") + "mode: TRAINING\n"
)


@pytest.fixture
def tensorflow():
    return pytest.importorskip("tensorflow")


def rows_of(number, rows=60):
    return np.random.default_rng(number).random((rows, 4), np.float32)


def test_the_variables_and_slots_of_a_tpu_embedding(tmp_path, imported, tensorflow):
    embedding = tensorflow.tpu.experimental.embedding
    user = embedding.TableConfig(60, 4, name="user", optimizer=embedding.Adagrad(0.1))
    item = embedding.TableConfig(20, 4, name="item", optimizer=embedding.Adam(0.1))
    features = (embedding.FeatureConfig(user, name="a"), embedding.FeatureConfig(item, name="b"))
    layer = embedding.TPUEmbeddingForServing(features, optimizer=embedding.SGD(0.1))
    layer.build()
    checkpoint = tensorflow.train.Checkpoint(model=layer)
    place = checkpoint.save(str(tmp_path / "tf" / "ckpt"))
    reader = tensorflow.train.load_checkpoint(place)
    for source in (place, f"{place}.index", tmp_path / "tf"):
        parts, result = imported(source)
        assert result["tables"] == {
            "user": {"parameters": "model/user", "accumulators": "model/user/accumulators"},
            "item": {
                "parameters": "model/item",
                "momenta": "model/item/momenta",
                "velocities": "model/item/velocities",
            },
        }
        assert list(result["skipped"]) == ["save_counter"]
        for name, slot in (("user", ""), ("user", "accumulators"), ("item", "momenta")):
            key = f"model/{name}{'.S' if slot else ''}{slot}/.ATTRIBUTES/VARIABLE_VALUE"
            np.testing.assert_array_equal(parts[name][slot or "parameters"], reader.get_tensor(key))
        (tmp_path / "c").rename(tmp_path / f"c{len(list(tmp_path.iterdir()))}")
    checkpoint.save(str(tmp_path / "tf" / "ckpt"))
    assert "holds 2 checkpoints; give one: " in imported(tmp_path / "tf", code=3)


def test_the_names_of_the_first_tpu_embedding_in_parts(tmp_path, imported, tensorflow):
    """A partitioned variable, as the API of TensorFlow 1 creates one per host."""
    arrays = {"user": rows_of(1), "user/Adagrad": rows_of(2), "item": rows_of(3, 20)}
    arrays |= {"item/Adam/m": rows_of(4, 20), "item/Adam/v": rows_of(5, 20)}
    names, slices, tensors = [], [], []
    for name, array in arrays.items():
        half = len(array) // 2
        for start in (0, half):
            names.append(name)
            slices.append(f"{len(array)} 4 {start},{half}:-")
            tensors.append(array[start : start + half])
    tensorflow.raw_ops.SaveV2(
        prefix=str(tmp_path / "model.ckpt"), tensor_names=names, shape_and_slices=slices, tensors=tensors
    )
    parts, _ = imported(tmp_path / "model.ckpt")
    for name, part, key in (
        ("user", "parameters", "user"),
        ("user", "accumulators", "user/Adagrad"),
        ("item", "parameters", "item"),
        ("item", "momenta", "item/Adam/m"),
        ("item", "velocities", "item/Adam/v"),
    ):
        np.testing.assert_array_equal(parts[name][part], arrays[key])


def test_a_damaged_checkpoint_of_tensorflow_is_exit_3(tmp_path, imported, tensorflow):
    tensorflow.raw_ops.SaveV2(
        prefix=str(tmp_path / "m"), tensor_names=["user"], shape_and_slices=[""], tensors=[rows_of(1)]
    )
    index, data = tmp_path / "m.index", tmp_path / "m.data-00000-of-00001"
    whole = index.read_bytes()
    index.write_bytes(whole[: len(whole) // 2])
    assert "m: cannot be read as a TensorFlow checkpoint: " in imported(tmp_path / "m", "--new-tables", code=3)
    index.write_bytes(whole)
    changed = bytearray(data.read_bytes())
    changed[100] ^= 1
    data.write_bytes(changed)
    text = imported(tmp_path / "m", "--new-tables", code=3)
    assert "m: 'user': rows 0 to 59 cannot be read: " in text
    assert "hecksum does not match" in text
    assert text.endswith("; it is damaged or incomplete\n")
    assert text.count("\n") == 1


KERAS = """
import sys
import keras
import numpy as np

inputs = [keras.Input((1,), dtype="int32") for _ in range(2)]
layers = [keras.layers.Embedding(60, 4, name="user"), keras.layers.Embedding(20, 4, name="item")]
both = keras.layers.Concatenate()([layer(each) for layer, each in zip(layers, inputs)])
model = keras.Model(inputs, keras.layers.Dense(1)(both))
model.compile(keras.optimizers.Adagrad(0.1), "mse")
model.fit([np.arange(20)[:, None]] * 2, np.ones((20, 1, 1)), verbose=0)
model.save_weights(sys.argv[1] + "/m.weights.h5")
user, item = (layer.embeddings for layer in layers)
np.savez(sys.argv[1] + "/expected", user=user, item=item, sums=model.optimizer.variables[2])
"""


def test_the_weights_of_a_keras_model_by_the_names_of_its_layers(tmp_path, imported, monkeypatch):
    pytest.importorskip("keras")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    subprocess.run([sys.executable, "-c", KERAS, tmp_path], check=True, capture_output=True)
    parts, result = imported(tmp_path / "m.weights.h5", "--map", "optimizer/vars/2=user/accumulators")
    expected = np.load(tmp_path / "expected.npz")
    assert result["tables"]["item"] == {"parameters": "layers/item/vars/0"}
    np.testing.assert_array_equal(parts["user"]["parameters"], expected["user"])
    np.testing.assert_array_equal(parts["user"]["accumulators"], expected["sums"])
    np.testing.assert_array_equal(parts["item"]["parameters"], expected["item"])
    assert "layers/dense/vars/0" in result["skipped"]


def test_a_weights_file_that_refers_to_other_files_or_is_damaged(tmp_path, imported):
    h5py = pytest.importorskip("h5py")
    (tmp_path / "secret").write_bytes(bytes(60 * 4 * 4))
    with h5py.File(tmp_path / "m.h5", "w") as file:
        outside = [(str(tmp_path / "secret"), 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("layers/user/vars/0", (60, 4), "f4", external=outside)
        file["layers/item/vars/0"] = h5py.ExternalLink(str(tmp_path / "secret"), "/")
    text = imported(tmp_path / "m.h5", code=3)
    assert "'layers/user/vars/0' is a dataset whose values are in other files, which are not read\n" in text
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file["layers/user/vars/0"] = rows_of(1)
    whole = (tmp_path / "m.h5").read_bytes()
    (tmp_path / "m.h5").write_bytes(whole[: len(whole) // 2])
    text = imported(tmp_path / "m.h5", "--new-tables", code=3)
    assert "m.h5: cannot be read as a weights file of Keras (HDF5): " in text


@pytest.mark.parametrize(
    ("library", "extra", "name", "start"),
    [
        ("h5py", "keras", "m.h5", b"\x89HDF\r\n\x1a\n"),
        ("tensorflow", "tensorflow", "m.index", b""),
        ("safetensors", "safetensors", "m.safetensors", b""),
    ],
)
def test_a_library_that_is_missing_names_its_extra(tmp_path, imported, monkeypatch, library, extra, name, start):
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / name).write_bytes(start)
    assert f"needs the package {library}: pip install 'penstock[{extra}]'\n" in imported(tmp_path / name, code=2)
