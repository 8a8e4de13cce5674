"""Files of torch.save, DCP's folders and safetensors as sources of an import, and as what an export writes."""

import enum
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cli import table  # noqa: E402
from commands_below import below  # noqa: E402
from dynamic import ALL_POLICIES  # noqa: E402
from every_optimizer import EVERY  # noqa: E402
from limits import HANG_S  # noqa: E402
from scripts import ROOT  # noqa: E402
from torch.distributed import checkpoint as dcp  # noqa: E402

import penstock as ps  # noqa: E402
from penstock.model.row_encodings import ENCODINGS  # noqa: E402

USER, ITEM = table("user", 60, 4), table("item", 20, 4, "adam { beta1: 0.9 beta2: 0.99 epsilon: 1e-8 }")
CONFIG = USER + ITEM + "mode: TRAINING\n"
MB = 1 << 20
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Evil:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def trained():
    """Two bags and a dense layer after a step of torch's optimizers."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"user": torch.nn.EmbeddingBag(60, 4), "item": torch.nn.EmbeddingBag(20, 4), "dense": torch.nn.Linear(4, 1)}
    )
    optimizers = torch.optim.Adagrad(model["user"].parameters()), torch.optim.Adam(model["item"].parameters())
    (model["user"](torch.arange(60)[:, None]) * model["item"](torch.arange(60)[:, None] % 20)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return model, [optimizer.state_dict()["state"][0] for optimizer in optimizers]


def test_a_model_and_its_optimizers_become_tables_and_slots(tmp_path, imported):
    model, (adagrad, adam) = trained()
    torch.save({"model": model.state_dict(), "user": adagrad, "adam.item": adam, "epoch": 3}, tmp_path / "m.pt")
    parts, result = imported(tmp_path / "m.pt")
    assert result["tables"]["user"] == {"parameters": "model.user.weight", "accumulators": "user.sum"}
    assert result["skipped"]["epoch"] == "no dense tensor, but int"
    assert result["skipped"]["model.dense.weight"] == "no table of the configuration has such a name"
    expected = {
        "user": {"parameters": model["user"].weight, "accumulators": adagrad["sum"]},
        "item": {"parameters": model["item"].weight, "momenta": adam["exp_avg"], "velocities": adam["exp_avg_sq"]},
    }
    for name, tensors in expected.items():
        for part, tensor in tensors.items():
            np.testing.assert_array_equal(parts[name][part], tensor.detach().numpy())


def test_names_of_torchrec_with_fused_optimizer_states(tmp_path, imported):
    names = {name: f"sparse.ebc.embedding_bags.{name}.weight" for name in ("t1", "t2")}
    weights = {names["t1"]: torch.rand(60, 4), names["t2"]: torch.rand(20, 4)}
    fused = {
        names["t1"]: {"t1.momentum1": torch.rand(60, 4)},
        names["t2"]: {f"t2.momentum{number}": torch.rand(20, 4) for number in (1, 2)},
    }
    torch.save({"model": weights, "optimizer": {"state": fused, "param_groups": [{"lr": 0.1}]}}, tmp_path / "m.pt")
    parts, _ = imported(tmp_path / "m.pt", "--map", "t1=user", "--map", "t2=item")
    np.testing.assert_array_equal(parts["user"]["parameters"], weights[names["t1"]])
    np.testing.assert_array_equal(parts["user"]["accumulators"], fused[names["t1"]]["t1.momentum1"])
    np.testing.assert_array_equal(parts["item"]["velocities"], fused[names["t2"]]["t2.momentum2"])


def many(tmp_path, num_tables=26):
    """A model of many tables in a list, of dims of their own, and the configuration of it."""
    torch.manual_seed(0)
    bags = [torch.nn.EmbeddingBag(20 + number, 4) for number in range(num_tables)]
    model = torch.nn.ModuleDict({"bottom": torch.nn.Linear(4, 4), "emb_l": torch.nn.ModuleList(bags)})
    text = "".join(table(f"t{number}", 20 + number, 4) for number in range(num_tables))
    (tmp_path / "tables.pbtxt").write_text(text + "mode: TRAINING\n")
    return model


def stepped(model, parameters):
    """The state of torch's Adagrad after a step whose gradients differ from row to row."""
    optimizer = torch.optim.Adagrad(parameters)
    for parameter in model.parameters():
        parameter.grad = torch.rand(parameter.shape) + 0.5
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("form", ["torch", "dcp"])
@pytest.mark.parametrize("way", ["names", "numbers"])
def test_one_flag_maps_the_states_of_many_tables(tmp_path, call, form, way):
    """With names, the numbers of the parameters, which the dense layer has shifted, do not count."""
    model = many(tmp_path)
    if way == "names":
        optim, maps = stepped(model, model.named_parameters()), ["emb_l.*=t*"]
        if not any("param_names" in group for group in optim["param_groups"]):
            pytest.skip("this torch saves no names of parameters")
    else:
        optim = stepped(model, model["emb_l"].parameters())
        maps = ["emb_l.*=t*", "optim.state.*.sum=t*/accumulators"]
    saved = {"model": model.state_dict(), "optim": optim}
    if form == "torch":
        torch.save(saved, tmp_path / "m")
    else:
        dcp.save(saved, checkpoint_id=tmp_path / "m", no_dist=True)
    words = "import", tmp_path / "m", tmp_path / "c", "--config", tmp_path / "tables.pbtxt"
    call(0, *words, *(word for each in maps for word in ("--map", each)))
    engine, first = ps.Engine.restore(tmp_path / "c"), 2 if way == "names" else 0
    for number, bag in enumerate(model["emb_l"]):
        parts = engine.retrieve_parameters(f"t{number}")
        np.testing.assert_array_equal(parts["parameters"], bag.weight.detach())
        np.testing.assert_array_equal(parts["accumulators"], optim["state"][first + number]["sum"])


def test_a_state_with_names_is_taken_without_a_flag_and_by_any(tmp_path, config, call):
    model, _ = trained()
    optim = stepped(model, model.named_parameters())
    if "param_names" not in optim["param_groups"][0]:
        pytest.skip("this torch saves no names of parameters")
    config.write_text(USER + table("item", 20, 4) + "mode: TRAINING\n")
    torch.save(model.state_dict(), tmp_path / "m.pt")
    torch.save(optim, tmp_path / "optim.pt")
    for number, maps in enumerate(
        ([], ["state.*.sum=*/accumulators"], [f"state.{n}.sum={name}/accumulators" for n, name in enumerate(model)][:2])
    ):
        words = "import", tmp_path / "m.pt", tmp_path / "optim.pt", tmp_path / f"c{number}", "--config", config
        _, result = call(0, *words, *(word for each in maps for word in ("--map", each)))
        for name in ("user", "item"):
            assert result["tables"][name]["accumulators"] == f"state.{name}.weight.sum"
        assert call(0, "diff", tmp_path / "c0", tmp_path / f"c{number}")[1]["equal"]
    sums = ps.Engine.restore(tmp_path / "c0").retrieve_parameters("item")["accumulators"]
    np.testing.assert_array_equal(sums, optim["state"][1]["sum"])
    by_both = "--map", "state.0.sum=user/accumulators", "--map", "state.user.weight.sum=user/accumulators"
    text, _ = call(2, *words[:3], tmp_path / "d", *words[4:], *by_both)
    assert "'state.user.weight.sum' is given twice, by its name and by its number" in text


def test_numbers_of_several_optimizers_name_no_tensor(tmp_path, imported):
    files = []
    for name, rows in (("user", 60), ("item", 20)):
        groups = [{"params": [0], "param_names": [f"{name}.weight"]}]
        optim = {"state": {0: {"sum": torch.rand(rows, 4)}}, "param_groups": groups}
        files.append(tmp_path / f"{name}.pt")
        torch.save({f"{name}.weight": torch.rand(rows, 4), **optim}, files[-1])
    text = imported(files, "--map", "state.0.sum=user/accumulators", code=2)
    assert "--map state.0.sum=user/accumulators (names=): no tensor and no table of this name in the source" in text
    _, result = imported(files, "--map", "state.user.weight.sum=user/accumulators")
    assert result["tables"]["user"]["accumulators"] == "state.user.weight.sum"


@pytest.mark.parametrize("form", ["torch", "dcp"])
@pytest.mark.parametrize("names", [["user.weight"], ["user.weight", "user.weight"], [1, 2], "ab", None])
def test_names_of_parameters_that_do_not_fit_are_refused(tmp_path, imported, form, names):
    state = {0: {"sum": torch.rand(60, 4)}, 1: {"sum": torch.rand(20, 4)}}
    optim = {"state": state, "param_groups": [{"params": [0, 1], "param_names": names}]}
    if form == "torch":
        torch.save({"user.weight": torch.rand(60, 4), "o": optim}, tmp_path / "m")
    else:
        dcp.save({"user.weight": torch.rand(60, 4), "o": optim}, checkpoint_id=tmp_path / "m", no_dist=True)
    text = imported(tmp_path / "m", "--new-tables", code=3)
    problem = "expected a list with a name for each of 'params', and no name twice"
    assert f"m: 'o.param_groups.0.param_names': {problem}" in text


def test_row_wise_accumulators_are_those_of_row_wise_adagrad(tmp_path, config, imported):
    sums = torch.rand(60) + 1
    torch.save({"embedding_bags.user.weight": torch.rand(60, 4), "user.momentum1": sums}, tmp_path / "m.pt")
    assert "RowWiseAdagrad has such accumulators" in imported(tmp_path / "m.pt", "--new-tables", code=3)
    user = ps.TableConfig(60, 4, name="user", optimizer=ps.RowWiseAdagrad(0.1))
    item = ps.TableConfig(20, 4, name="item", optimizer=ps.SGD(0.1))
    ps.EmbeddingConfig.from_tables([user, item]).save(config)
    parts, _ = imported(tmp_path / "m.pt", "--new-tables")
    np.testing.assert_array_equal(parts["user"]["accumulators"][:, 0], sums)


def test_slots_of_another_optimizer_are_reported(tmp_path, imported):
    torch.save({"user.weight": torch.rand(60, 4), "user.exp_avg": torch.rand(60, 4)}, tmp_path / "m.pt")
    _, result = imported(tmp_path / "m.pt", "--new-tables")
    assert result["skipped"] == {"user.exp_avg": "table 'user' (Adagrad) has no such slot"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_other_floats_are_converted_exactly(tmp_path, imported, dtype, form):
    rows = torch.rand(60, 4).to(dtype)
    if form == "safetensors":
        save = pytest.importorskip("safetensors.torch").save_file
        save({"user.weight": rows}, tmp_path / "m")
    else:
        torch.save({"user.weight": rows}, tmp_path / "m")
    parts, _ = imported(tmp_path / "m", "--new-tables")
    np.testing.assert_array_equal(parts["user"]["parameters"], rows.float())


@pytest.mark.parametrize("form", ["torch", "safetensors", "parquet"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_an_export_is_imported_bit_by_bit(tmp_path, config, call, form, kind):
    if form == "safetensors":
        pytest.importorskip("safetensors")
    dynamic = {"user": ALL_POLICIES, "item": ps.Dynamic(key_type="uint64")} if kind == "dynamic" else {}
    tables = [
        ps.TableConfig(64, 4, name="user", optimizer=ps.Adagrad(0.1), dynamic=dynamic.get("user")),
        ps.TableConfig(64, 3, name="item", optimizer=ps.Adam(0.1), dynamic=dynamic.get("item")),
    ]
    ps.EmbeddingConfig.from_tables(tables).save(config)
    engine = ps.Engine(ps.EmbeddingConfig.load(config))
    for step in range(3):
        ids = np.arange(step, step + 20)
        engine.apply({"user": (ids, np.ones((20, 4))), "item": (ids, np.ones((20, 3)))})
    engine.save(tmp_path / "a")
    place = tmp_path / "a"
    for number in range(2):
        _, result = call(0, "export", place, tmp_path / f"out{number}", "--format", form)
        place = tmp_path / f"c{number}"
        sources = [tmp_path / f"out{number}"] if form == "parquet" else result["out"]
        call(0, "import", *sources, place, "--config", config)
    differences = call(1, "diff", tmp_path / "a", tmp_path / "c0")[1]["differences"]
    assert differences == {"global_step": [3, 0]}
    assert call(0, "diff", tmp_path / "c0", tmp_path / "c1")[1]["equal"]


def test_torch_loads_what_export_writes(tmp_path, call):
    tables = [ps.TableConfig(60, 4, name="user", optimizer=ps.Adagrad(0.1))]
    tables += [ps.TableConfig(20, 3, name="item", optimizer=ps.Adam(0.1))]
    engine = ps.Engine(ps.EmbeddingConfig.from_tables(tables))
    engine.save(tmp_path / "c")
    text, _ = call(0, "export", tmp_path / "c", tmp_path / "m.pt", "--format", "torch")
    assert text.startswith(f"wrote     {tmp_path}/m.pt\nwrote     {tmp_path}/m.slots.pt\n")
    model = torch.nn.ModuleDict({"user": torch.nn.EmbeddingBag(60, 4), "item": torch.nn.Embedding(20, 3)})
    model.load_state_dict(torch.load(tmp_path / "m.pt"), strict=True)
    for name in model:
        np.testing.assert_array_equal(model[name].weight.detach(), engine.retrieve_parameters(name)["parameters"])
    assert list(torch.load(tmp_path / "m.slots.pt")) == ["user.accumulators", "item.momenta", "item.velocities"]


def test_either_file_of_an_export_is_imported(tmp_path, config, call):
    engine = ps.Engine(ps.EmbeddingConfig.load(config))
    engine.apply({"user": ([5], [[1.0, 2.0, 3.0, 4.0]])})
    engine.save(tmp_path / "c")
    call(0, "export", tmp_path / "c", tmp_path / "m.pt", "--format", "torch")
    _, result = call(0, "import", tmp_path / "m.pt", tmp_path / "weights", "--config", config)
    assert result["initial"] == {"user": ["accumulators"], "item": ["momenta", "velocities"]}
    np.testing.assert_array_equal(
        ps.Engine.restore(tmp_path / "weights").lookup("user", [5]), engine.lookup("user", [5])
    )
    text, _ = call(3, "import", tmp_path / "m.slots.pt", tmp_path / "slots", "--config", config)
    assert "no weights of table 'user' in a file of torch.save" in text
    assert "names them, if no other SOURCE has them" in text
    assert not (tmp_path / "slots").exists()
    other = ps.Engine(ps.EmbeddingConfig.load(config))
    other.read_tables([tmp_path / "m.slots.pt", tmp_path / "m.pt"])  # in any order
    for name in ("user", "item"):
        for part, rows in engine.retrieve_parameters(name).items():
            assert other.retrieve_parameters(name)[part].tobytes() == rows.tobytes()


def test_slots_of_every_optimizer_are_exported_and_imported_bit_by_bit(tmp_path, call):
    tables = [ps.TableConfig(20, 4, name=f"t{number}", optimizer=each) for number, each in enumerate(EVERY)]
    config = ps.EmbeddingConfig.from_tables(tables)
    config.save(tmp_path / "t.pbtxt")
    engine = ps.Engine(config)
    rng = np.random.default_rng(0)
    engine.apply({each.name: (np.arange(20), rng.standard_normal((20, 4), np.float32)) for each in tables})
    engine.save(tmp_path / "c")
    _, result = call(0, "export", tmp_path / "c", tmp_path / "m.pt", "--format", "torch")
    _, result = call(0, "import", *result["out"], tmp_path / "d", "--config", tmp_path / "t.pbtxt")
    assert (result["initial"], result["derived"], result["skipped"]) == ({}, {}, {})
    assert call(1, "diff", tmp_path / "c", tmp_path / "d")[1]["differences"] == {"global_step": [1, 0]}


def test_an_export_without_slots_is_one_file_and_leaves_none_of_an_earlier_one(tmp_path, config, call):
    without = table("user", 60, 4, "stochastic_gradient_descent {}") + "mode: TRAINING\n"
    for text, files in ((CONFIG, ["m.pt", "m.slots.pt"]), (without, ["m.pt"])):
        config.write_text(text)
        ps.Engine(ps.EmbeddingConfig.load(config)).save(tmp_path / f"c{len(files)}")
        _, result = call(0, "export", tmp_path / f"c{len(files)}", tmp_path / "m.pt", "--format", "torch")
        assert result["out"] == [f"{tmp_path}/{name}" for name in files]
        assert sorted(path.name for path in tmp_path.glob("m*")) == files


@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
def test_an_export_to_a_full_file_system_is_exit_6_and_leaves_nothing(tmp_path, config, call):
    ps.Engine(ps.EmbeddingConfig.load(config)).save(tmp_path / "c")
    call(0, "export", tmp_path / "c", tmp_path / "m.pt", "--format", "torch")
    sizes = [(tmp_path / name).stat().st_size for name in ("m.pt", "m.slots.pt")]
    assert sizes[0] < sizes[1]
    for name in ("m.pt", "m.slots.pt"):
        (tmp_path / name).unlink()
    for most in (200, sizes[1] - 100):  # the scratch file, or the second file
        done = below(64 << 30, "export", tmp_path / "c", tmp_path / "m.pt", "--format", "torch", file_bytes=most)
        assert (done.returncode, done.stderr.count("\n")) == (6, 1), done.stderr
        assert "cannot write: file too large; raise the limit on file sizes" in done.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "tables.pbtxt"]


def test_a_pickle_of_objects_is_not_loaded(tmp_path, imported):
    torch.save({"user.weight": torch.rand(60, 4), "x": Evil(tmp_path / "created")}, tmp_path / "m.pt")
    text = imported(tmp_path / "m.pt", code=3)
    assert "m.pt: 'x' is an object of getattr, whose class penstock does not load: only tensors, plain data" in text
    assert "; the file also has user.weight; where you trust it, torch.save(torch.load('" in text
    assert not (tmp_path / "created").exists()


def test_damaged_and_old_files_are_exit_3(tmp_path, imported):
    torch.save({"user.weight": torch.rand(60, 4)}, tmp_path / "m.pt")
    whole = (tmp_path / "m.pt").read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 10):
        (tmp_path / "m.pt").write_bytes(whole[:length])
        assert "m.pt: " in imported(tmp_path / "m.pt", code=3)
    torch.save({"user.weight": torch.rand(60, 4)}, tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "m.pt").read_bytes()
    for length in (100, len(whole) // 2, len(whole) - 10):
        (tmp_path / "m.pt").write_bytes(whole[:length])
        assert "m.pt: cannot be read as a file of torch.save: " in imported(tmp_path / "m.pt", code=3)
    pytest.importorskip("safetensors.torch").save_file({"user.weight": torch.rand(60, 4)}, tmp_path / "m.safetensors")
    whole = (tmp_path / "m.safetensors").read_bytes()
    for damaged in (whole[:5], whole[:-5], b"\xff" * 8 + whole[8:]):
        (tmp_path / "m.safetensors").write_bytes(damaged)
        text = imported(tmp_path / "m.safetensors", code=3)
        assert "cannot be read as a safetensors file: " in text


def saved_by_dcp(folder, writer=None, **more):
    """A folder of DCP with TorchRec's names."""
    state = {"embedding_bags.user.weight": {"user.momentum1": torch.rand(60, 4)}}
    tensors = {"embedding_bags.user.weight": torch.rand(60, 4), "embedding_bags.item.weight": torch.rand(20, 4)}
    saved = {"model": tensors, "optim": {"state": state, "param_groups": [{"lr": 0.1}]}, "step": 3, **more}
    dcp.save(saved, checkpoint_id=folder, storage_writer=writer, no_dist=True)
    return tensors, state["embedding_bags.user.weight"]["user.momentum1"]


def test_a_folder_of_dcp(tmp_path, imported, monkeypatch):
    monkeypatch.setattr("penstock.io.table_formats.tensor_blocks._BLOCK_BYTES", 7 * 4 * 8)
    tensors, sums = saved_by_dcp(tmp_path / "dcp")
    parts, result = imported(tmp_path / "dcp")
    np.testing.assert_array_equal(parts["user"]["parameters"], tensors["embedding_bags.user.weight"])
    np.testing.assert_array_equal(parts["user"]["accumulators"], sums)
    np.testing.assert_array_equal(parts["item"]["parameters"], tensors["embedding_bags.item.weight"])
    assert result["skipped"] == {"optim.param_groups.0.lr": "no tensor", "step": "no tensor"}


def test_shards_that_dcp_wrote_as_safetensors_are_refused(tmp_path, imported):
    if not hasattr(dcp.filesystem, "SerializationFormat"):
        pytest.skip("torch has one form")
    safetensors = dcp.filesystem.SerializationFormat.SAFETENSORS
    saved_by_dcp(tmp_path / "dcp", dcp.FileSystemWriter(tmp_path / "dcp", serialization_format=safetensors))
    text = imported(tmp_path / "dcp", code=3)
    assert "weight': saved as safetensors, which torch does not load from" in text
    assert "save it again with SerializationFormat.TORCH_SAVE" in text


def test_shards_of_rows_and_of_columns_from_two_ranks(tmp_path, imported, monkeypatch):
    monkeypatch.setattr("penstock.io.table_formats.tensor_blocks._BLOCK_BYTES", 7 * 4 * 8)
    words = [sys.executable, ROOT / "tests" / "support" / "dcp_rank.py", tmp_path / "dcp", tmp_path / "rendezvous"]
    ranks = [subprocess.Popen([*map(str, words), str(rank)]) for rank in range(2)]
    assert [rank.wait(HANG_S) for rank in ranks] == [0, 0]
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    parts, _ = imported(tmp_path / "dcp")
    np.testing.assert_array_equal(parts["user"]["parameters"], np.arange(240).reshape(60, 4))
    np.testing.assert_array_equal(parts["item"]["parameters"], np.arange(80).reshape(20, 4))


class OldPickler(pickle.Pickler):
    """Pickles the members of an Enum as Python 3.11.2 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_the_metadata_of_any_python_is_read(tmp_path, imported):
    saved_by_dcp(tmp_path / "dcp")
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    with file.open("wb") as stream:
        OldPickler(stream).dump(metadata)
    assert b"getattr" in file.read_bytes()
    _, result = imported(tmp_path / "dcp")
    assert result["rows"] == {"user": 60, "item": 20}


def test_a_hostile_metadata_runs_nothing(tmp_path, imported):
    saved_by_dcp(tmp_path / "dcp")
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for field in ("planner_data", "storage_meta"):
        setattr(metadata, field, Evil(tmp_path / "created"))
        file.write_bytes(pickle.dumps(metadata))
        text = imported(tmp_path / "dcp", code=3)
        assert "dcp/.metadata: names pathlib.Path.touch" in text or "dcp/.metadata: names builtins.getattr" in text
    file.write_bytes(pickle.dumps(os.system))
    assert f"names {os.system.__module__}.system, which no such checkpoint contains; nothing" in imported(
        tmp_path / "dcp", code=3
    )
    assert not (tmp_path / "created").exists()


def test_hostile_names_of_parameters_run_nothing(tmp_path, imported):
    groups = [{"params": [0], "param_names": Evil(tmp_path / "created")}]
    optim = {"state": {0: {"sum": torch.rand(60, 4)}}, "param_groups": groups}
    dcp.save({"user.weight": torch.rand(60, 4), "optim": optim}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    text = imported(tmp_path / "dcp", "--new-tables", code=3)
    assert "dcp: cannot be read as plain data, 'optim.param_groups.0.param_names': Weights only load failed" in text
    assert not (tmp_path / "created").exists()


def test_a_damaged_folder_of_dcp_is_exit_3(tmp_path, imported):
    saved_by_dcp(tmp_path / "dcp")
    file, (data,) = tmp_path / "dcp" / ".metadata", list((tmp_path / "dcp").glob("*.distcp"))
    whole, rows = file.read_bytes(), data.read_bytes()
    for damaged in (b"", whole[:200], b"damaged" * 50, pickle.dumps({"no": "metadata"})):
        file.write_bytes(damaged)
        assert "dcp/.metadata: cannot be read as a checkpoint of torch.distributed.checkpoint" in imported(
            tmp_path / "dcp", code=3
        )
    metadata = pickle.loads(whole)
    for info in metadata.storage_data.values():
        info.relative_path = "../outside"
    file.write_bytes(pickle.dumps(metadata))
    assert "refers to '../outside', outside its folder; nothing was loaded" in imported(tmp_path / "dcp", code=3)
    file.write_bytes(whole)
    data.write_bytes(rows[: len(rows) // 3])
    assert "cannot be read" in imported(tmp_path / "dcp", code=3)
    data.unlink()
    assert f"'{data.name}' is missing; copy the whole folder" in imported(tmp_path / "dcp", code=3)


def test_without_torch_one_line_says_what_to_install(tmp_path, imported, call, monkeypatch):
    torch.save({"user.weight": torch.rand(60, 4)}, tmp_path / "m.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    for source in ("m.pt", "dcp"):
        assert "needs the package torch: pip install 'penstock[torch]'" in imported(tmp_path / source, code=2)
    ps.Engine(ps.EmbeddingConfig.load(tmp_path / "tables.pbtxt")).save(tmp_path / "saved")
    text, _ = call(2, "export", tmp_path / "saved", tmp_path / "new.pt", "--format", "torch")
    assert "--format torch: needs the package torch: pip install 'penstock[torch]'" in text


@pytest.mark.evidence
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_import_and_export_need_memory_for_one_table_more_than_blocks(tmp_path):
    """Two tables of 128 MB each: an import needs both, and an export one; neither needs the file in memory."""
    rows, dim = MB, 32
    sgd = "stochastic_gradient_descent {}"
    text = table("user", rows, dim, sgd) + table("item", rows, dim, sgd) + "mode: TRAINING\n"
    (tmp_path / "t.pbtxt").write_text(text)
    torch.save({f"{name}.weight": torch.rand(rows, dim) for name in ("user", "item")}, tmp_path / "m.pt")
    importing = "import", tmp_path / "m.pt", tmp_path / "c", "--config", tmp_path / "t.pbtxt"
    assert 256 * MB < peak_of(*importing) < (256 + 110) * MB
    (tmp_path / "m.pt").unlink()
    exporting = "export", tmp_path / "c", tmp_path / "out.pt", "--format", "torch"
    assert peak_of(*exporting) < (128 + 64) * MB


def peak_of(*words):
    script = ROOT / "tests" / "support" / "peak_memory.py"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    done = subprocess.run([sys.executable, script, *map(str, words)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize(("rows", "width", "dtype"), [("bfloat16", 4, "bfloat16"), ("int8", 4 + 8, "uint8")])
def test_an_export_for_serving_has_encoded_weights_alone(rows, width, dtype, tmp_path, config, call):
    engine = ps.Engine(ps.EmbeddingConfig.load(config))
    engine.save(tmp_path / "c")
    call(0, "export", tmp_path / "c", tmp_path / "m.pt", "--format", "torch")
    call(0, "export", tmp_path / "c", tmp_path / "m.pt", "--format", "torch", "--rows", rows)
    assert not (tmp_path / "m.slots.pt").exists()  # of the export before
    weights = torch.load(tmp_path / "m.pt")
    assert {name: (tuple(each.shape), str(each.dtype)) for name, each in weights.items()} == {
        "user.weight": ((60, width), f"torch.{dtype}"),
        "item.weight": ((20, width), f"torch.{dtype}"),
    }
    assert (
        weights["item.weight"].view(torch.uint8).numpy().tobytes()
        == ENCODINGS[rows].encode(engine.lookup("item", range(20))).tobytes()
    )


def test_keys_lie_next_to_encoded_weights_of_any_size(tmp_path, call):
    engine = ps.Engine(
        ps.EmbeddingConfig.from_tables([ps.TableConfig(9, 3, name="user", optimizer=ps.SGD(0.1), dynamic=ps.Dynamic())])
    )
    engine.apply({"user": ([2**40, 5, 7], np.ones((3, 3), np.float32))})
    engine.save(tmp_path / "c")
    call(0, "export", tmp_path / "c", tmp_path / "m.pt", "--format", "torch", "--rows", "int8")
    assert torch.load(tmp_path / "m.slots.pt")["user.keys"].tolist() == [5, 7, 2**40]
    rows = torch.load(tmp_path / "m.pt")["user.weight"].numpy()
    assert rows.tobytes() == ENCODINGS["int8"].encode(engine.lookup("user", [5, 7, 2**40])).tobytes()


def test_weights_in_8_bits_are_no_source_of_an_import(tmp_path, config, call, refused):
    ps.Engine(ps.EmbeddingConfig.load(config)).save(tmp_path / "c")
    call(0, "export", tmp_path / "c", tmp_path / "m.pt", "--format", "torch", "--rows", "int8")
    line = refused(3, "import", tmp_path / "m.pt", tmp_path / "new", "--config", config)
    assert "'user.weight'" in line
    assert "got uint8" in line
