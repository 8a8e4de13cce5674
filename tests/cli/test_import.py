"""``penstock import``: the tables of a source become a checkpoint, or one line says why not and nothing is written."""

import os
import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from cli import frame, table
from commands_below import below
from ipc import write

import penstock as ps
from penstock.rows.table_io import LoadedTables

CONFIG = table() + table("item", 20, 3, "adam { beta1: 0.9 beta2: 0.99 epsilon: 1e-8 }") + "mode: TRAINING\n"
MB = 1 << 20


def rows_of(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).random(shape, np.float32) + np.float32(0.5)


ARRAYS = {
    "user": rows_of(50, 2),
    "user/accumulators": rows_of(50, 2, seed=1),
    "item": rows_of(20, 3),
    "item/momenta": rows_of(20, 3, seed=1),
    "item/velocities": rows_of(20, 3, seed=2),
}


def folder_of(path, arrays=ARRAYS, **changed):
    """A folder of NumPy files. changed : arrays that replace others; None: none"""
    for name, array in {**arrays, **changed}.items():
        if array is not None:
            file = path / f"{name}.npy"
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, array)
    return path


@pytest.fixture
def imported(tmp_path, config, call):
    """imported(words…) → what an import of source/ into c/ prints, as text and as JSON."""

    def run(*words):
        return call(0, "import", tmp_path / "source", tmp_path / "c", "--config", config, *words)

    return run


@pytest.fixture
def refusal(tmp_path, config, refused):
    """refusal(code, words…) → the line that an import of source/ into c/ fails with. It writes nothing."""

    def run(code, *words):
        line = refused(code, "import", tmp_path / "source", tmp_path / "c", "--config", config, *words)
        assert not (tmp_path / "c").exists()
        return line

    return run


def parts_of(folder, name):
    return ps.Engine.restore(folder).retrieve_parameters(name)


def test_every_part_becomes_that_of_the_checkpoint(tmp_path, imported):
    folder_of(tmp_path / "source", bias=np.zeros(3))
    text, result = imported()
    assert text == (
        "took      user: 50 rows: parameters of 'user', accumulators of 'user/accumulators'\n"
        "took      item: 20 rows: parameters of 'item', momenta of 'item/momenta', velocities of 'item/velocities'\n"
        "skipped   bias: no table of the configuration has such a name\n"
        f"wrote     {tmp_path}/c\n"
    )
    assert result["rows"] == {"item": 20, "user": 50}
    for name, (weights, *slots) in {
        "user": ("user", "accumulators"),
        "item": ("item", "momenta", "velocities"),
    }.items():
        parts = parts_of(tmp_path / "c", name)
        np.testing.assert_array_equal(parts["parameters"], ARRAYS[weights])
        for slot in slots:
            np.testing.assert_array_equal(parts[slot], ARRAYS[f"{name}/{slot}"])


def test_a_run_continues_from_an_import(tmp_path, config, imported, call):
    folder_of(tmp_path / "source")
    imported("--num-required", 2)
    log = tmp_path / "log.arrows"
    write(log, [frame(0), frame(1)])
    words = "--table", "user", "--checkpoint", tmp_path / "c", "--resume", "--num-required", 2
    assert call(0, "replay", config, log, *words)[1]["steps"] == 1


def test_parts_that_are_not_there_keep_their_initial_values(tmp_path, imported):
    folder_of(tmp_path / "source", {"user": ARRAYS["user"]})
    text, result = imported("--new-tables", "--seed", 3)
    assert "initial   user: accumulators\ninitial   item: parameters, momenta, velocities\n" in text
    assert result["initial"] == {"user": ["accumulators"], "item": ["parameters", "momenta", "velocities"]}
    fresh = ps.Engine(ps.EmbeddingConfig.load(tmp_path / "tables.pbtxt"), seed=3)
    for name, part in (("user", "accumulators"), ("item", "parameters")):
        expected = fresh.retrieve_parameters(name)[part]
        np.testing.assert_array_equal(parts_of(tmp_path / "c", name)[part], expected)


def test_tables_and_tensors_are_mapped(tmp_path, imported):
    arrays = {
        "u_emb": ARRAYS["user"],
        "u_emb.sum": ARRAYS["user/accumulators"],
        "item": ARRAYS["item"],
        "x": rows_of(20, 3),
    }
    folder_of(tmp_path / "source", arrays, item2=rows_of(20, 3, seed=5))
    text, result = imported("--map", "u_emb=user", "--map", "x=item/momenta", "--map", "item2=item")
    assert result["tables"] == {
        "user": {"parameters": "u_emb", "accumulators": "u_emb.sum"},
        "item": {"parameters": "item2", "momenta": "x"},
    }
    assert "skipped   item: 'item2' is read for the same part\n" in text
    np.testing.assert_array_equal(parts_of(tmp_path / "c", "item")["momenta"], arrays["x"])


def test_two_tables_may_have_each_others_names(tmp_path, call):
    (tmp_path / "t.pbtxt").write_text(table() + table("item") + "mode: TRAINING\n")
    arrays = {name: rows_of(50, 2, seed=n) for n, name in enumerate(["user", "user.sum", "item", "item.sum"])}
    words = "import", folder_of(tmp_path / "source", arrays), tmp_path / "c", "--config", tmp_path / "t.pbtxt"
    call(0, *words, "--map", "user=item", "--map", "item=user")
    for name, other in (("user", "item"), ("item", "user")):
        parts = parts_of(tmp_path / "c", name)
        np.testing.assert_array_equal(parts["parameters"], arrays[other])
        np.testing.assert_array_equal(parts["accumulators"], arrays[f"{other}.sum"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--map", "user=users"], "--map user=users (names=): expected a table, or TABLE/SLOT with a slot of its"),
        (["--map", "user=user/momenta"], "expected a table, or TABLE/SLOT with a slot of its optimizer; tables: "),
        (["--map", "nothing=user"], "--map nothing=user (names=): no tensor and no table of this name in the source"),
        (["--map", "user=user", "--map", "item=user"], "--map item=user (names=): another name is mapped to user"),
        (["--map", "user=user", "--map", "user=item"], "--map user: given twice, as 'user' and as 'item'"),
        (["--map", "user"], "--map user: expected NAME=TABLE"),
        (["--map", "*=user"], "--map *=user (names=): expected one * on each side, which stands for the same text"),
        (["--map", "*/*=*"], "--map */*=* (names=): expected one * on each side"),
        (["--map", "*=*/mom"], "--map *=*/mom (names=): expected a table, or TABLE/SLOT with a slot of its optimizer"),
        (["--map", "s/*=*/momenta"], "--map s/*=*/momenta (names=): matches nothing in the source; it has item"),
    ],
)
def test_a_name_that_does_not_exist_is_exit_2(tmp_path, refusal, words, problem):
    folder_of(tmp_path / "source")
    assert problem in refusal(2, *words)


def numbered(tmp_path, names=("t0", "t1", "t2")):
    """A configuration of tables t0, t1 …, and the sources of an import of it, as words."""
    text = "".join(table(name, 20 + number) for number, name in enumerate(names))
    (tmp_path / "t.pbtxt").write_text(text + "mode: TRAINING\n")
    return "import", tmp_path / "source", tmp_path / "c", "--config", tmp_path / "t.pbtxt"


def test_a_pattern_maps_the_parts_of_all_tables(tmp_path, call):
    weights = {f"model/emb/{n}/weight": rows_of(20 + n, 2) for n in range(3)}
    slots = {f"state/{n}/sum": rows_of(20 + n, 2, seed=1) for n in range(3)}
    words = numbered(tmp_path)
    folder_of(tmp_path / "source", weights | slots | {"model/emb/bias": rows_of(3), "state/3/sum": rows_of(3)})
    _, result = call(0, *words, "--map", "emb/*=t*", "--map", "state/*/sum=t*/accumulators")
    for n in range(3):
        parts = parts_of(tmp_path / "c", f"t{n}")
        np.testing.assert_array_equal(parts["parameters"], weights[f"model/emb/{n}/weight"])
        np.testing.assert_array_equal(parts["accumulators"], slots[f"state/{n}/sum"])
    assert set(result["skipped"]) == {"model/emb/bias", "state/3/sum"}


def test_an_exact_name_wins_over_a_pattern(tmp_path, call):
    words = numbered(tmp_path, ["t0", "t1"])
    arrays = {f"{part}/{n}": rows_of(20 + n, 2) for n in range(2) for part in ("w", "s")} | {"other": rows_of(21, 2)}
    folder_of(tmp_path / "source", arrays)
    maps = "--map", "s/*=t*/accumulators", "--map", "w/*=t*", "--map", "other=t1/accumulators"
    _, result = call(0, *words, *maps)
    assert result["tables"]["t0"] == {"parameters": "w/0", "accumulators": "s/0"}
    assert result["tables"]["t1"] == {"parameters": "w/1", "accumulators": "other"}


def test_the_text_of_a_pattern_may_be_the_path_to_a_tables_weights(tmp_path, call):
    """As the keys of an optimizer's state are; those of no table are skipped."""
    names = "user", "a.user"
    words = numbered(tmp_path, names)
    weights = {f"model.ebc.{name}.weight": rows_of(20 + n, 2) for n, name in enumerate(names)}
    slots = {f"opt.ebc.{name}.weight.mean": rows_of(20 + n, 2, seed=1) for n, name in enumerate(names)}
    np.savez(tmp_path / "m.npz", **weights, **slots, **{"opt.dense.weight.mean": rows_of(3)})
    (tmp_path / "m.npz").rename(tmp_path / "source")
    _, result = call(0, *words, "--map", "opt.*.mean=*/accumulators")
    for name in names:
        expected = {"parameters": f"model.ebc.{name}.weight", "accumulators": f"opt.ebc.{name}.weight.mean"}
        assert result["tables"][name] == expected
    assert list(result["skipped"]) == ["opt.dense.weight.mean"]


@pytest.mark.parametrize(
    ("maps", "problem"),
    [
        (["*/s=*/accumulators"], "a/user/s, b/user/s would all be user/accumulators; choose one: --map NAME=user/acc"),
        (["a/*/s=*/accumulators", "b/*/s=*/accumulators"], "'b/user/s' would be user/accumulators, and so would"),
        (["a/*/s=*/accumulators", "a/u*/s=u*"], "'a/user/s' would be user, and by another --map user/accumulators"),
    ],
)
def test_patterns_that_do_not_say_one_tensor_are_exit_2(tmp_path, refusal, maps, problem):
    rows = rows_of(50, 2)
    folder_of(tmp_path / "source", **{"a/user/s": rows, "b/user/s": rows})
    assert problem in refusal(2, *(word for each in maps for word in ("--map", each)))


def test_several_sources_are_joined(tmp_path, config, call, refused):
    slots = {name: rows for name, rows in ARRAYS.items() if "/" in name}
    folder_of(tmp_path / "source", {name: rows for name, rows in ARRAYS.items() if "/" not in name})
    np.savez(tmp_path / "slots.npz", **slots)
    both = "import", tmp_path / "source", tmp_path / "slots.npz", tmp_path / "c", "--config", config
    _, result = call(0, *both)
    assert result["sources"] == [f"{tmp_path}/source", f"{tmp_path}/slots.npz"]
    assert result["initial"] == {}
    folder_of(tmp_path / "all")
    call(0, "import", tmp_path / "all", tmp_path / "d", "--config", config)
    assert call(0, "diff", tmp_path / "c", tmp_path / "d")[1]["equal"]
    engine = ps.Engine(ps.EmbeddingConfig.load(config))
    assert engine.read_tables([tmp_path / "source", tmp_path / "slots.npz"]).format == "numpy"
    call(0, "export", tmp_path / "c", tmp_path / "parquet")
    for other, problem in (
        ("all", f"all: 'item' is also in {tmp_path}/source; give one of them, or save them under other names"),
        ("parquet", f"{tmp_path}/source, {tmp_path}/parquet: give a folder of Parquet files alone; it has all parts"),
        ("missing", "missing: no such file or folder"),
    ):
        words = "import", tmp_path / "source", tmp_path / other, tmp_path / "e", "--config", config
        assert problem in refused(2 if other == "parquet" else 3, *words)
        assert not (tmp_path / "e").exists()
    assert "unexpected argument 'e'" in refused(2, "import", "source", "slots.npz", "--config", config, "e")
    words = "import", tmp_path / "slots.npz", tmp_path / "e", "--config", config
    assert "--map NAME=user (names=) names them, if no other SOURCE has them; --new-tables" in refused(3, *words)
    with pytest.raises(ps.UsageError, match=r"directory: expected a path, got \[\]"):
        engine.read_tables([])


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"user": rows_of(60, 2)},
            "expected shape (50, 2), got (60, 2); set vocabulary_size 60 and dimension 2",
        ),
        (
            {"item": rows_of(20, 4)},
            "expected shape (20, 3), got (20, 4); set vocabulary_size 20 and dimension 4",
        ),
        (
            {"user/accumulators": rows_of(50)},
            "got (50,); it has one number per row: RowWiseAdagrad has such accumulators",
        ),
        ({"item": np.zeros((20, 3), np.int8)}, "expected floats of type float16, bfloat16, float32, float64, got int8"),
        (
            {"item": None},
            "no weights of table 'item' in a NumPy file, or a folder of them; there: item/momenta float32 (20, 3), "
            "item/velocities float32 (20, 3), user/accumulators float32 (50, 2), user float32 (50, 2); --map NAME=item",
        ),
        (
            {"m/user": rows_of(50, 2), "n/user": rows_of(9), "user": None},
            "m/user, n/user are all named like user; choose one: --map NAME=user",
        ),
        (
            {"user": np.full((50, 2), np.inf, "f4")},
            "row 0, column 0: expected a number that is finite, got inf",
        ),
        ({"user": np.full((50, 2), 1e300)}, "row 0, column 0: expected a number that is finite, got 1e+300"),
        ({"user/accumulators": rows_of(50, 2) - 2}, "expected a number that is at least 0, got -"),
    ],
)
def test_a_tensor_that_does_not_fit_is_exit_3_with_its_name(tmp_path, refusal, changed, problem):
    folder_of(tmp_path / "source", **changed)
    assert problem in refusal(3)


def test_a_source_that_is_missing_damaged_or_unknown_is_exit_3(tmp_path, refusal):
    assert f"{tmp_path}/source: no such file or folder" in refusal(3)
    (tmp_path / "source").write_bytes(b"")
    line = refusal(3)
    assert "source: an empty file" in line
    (tmp_path / "source").write_bytes(bytes(20))
    line = refusal(3)
    assert "source: tables in no known format; expected a NumPy file, or a folder of them, a TensorFlow check" in line
    (tmp_path / "source").unlink()
    ps.Engine(ps.EmbeddingConfig.load(tmp_path / "tables.pbtxt")).save(tmp_path / "source")
    assert "source: a checkpoint of penstock; export it, or continue from it with --resume" in refusal(3)
    shutil.rmtree(tmp_path / "source")
    folder_of(tmp_path / "source")
    file = tmp_path / "source" / "user.npy"
    file.write_bytes(file.read_bytes()[:-5])
    assert f"{file}: cannot be read as a NumPy file: " in refusal(3)
    np.save(file, ARRAYS["user"])
    file.write_bytes(file.read_bytes().replace(b"False", b"(alse"))
    assert f"{file}: cannot be read as a NumPy file: " in refusal(3)
    np.save(file, np.array([{"no": "floats"}]), allow_pickle=True)
    assert "'user' is Python objects, which are pickled and never loaded" in refusal(3)


def test_a_folder_in_use_is_exit_2_and_unchanged(tmp_path, config, imported, refused):
    folder_of(tmp_path / "source")
    imported()
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "c").iterdir())
    words = "import", tmp_path / "source", tmp_path / "c", "--config", config
    assert "c: holds a checkpoint; give a new or empty folder" in refused(2, *words)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "c").iterdir()) == before
    assert "source: holds other files; give a new or empty folder" in refused(2, *words[:2], *words[1:2], *words[3:])
    assert "missing.pbtxt" in refused(4, *words[:2], tmp_path / "d", "--config", tmp_path / "missing.pbtxt")


def test_zeros_that_an_update_would_divide_by_are_raised_and_reported(tmp_path, imported):
    """torch's Adagrad starts at 0 and has an epsilon; here a gradient of 0 would make a NaN of the row."""
    sums = ARRAYS["user/accumulators"].copy()
    sums[[3, 4], 0] = 0
    folder_of(tmp_path / "source", **{"user/accumulators": sums})
    text, result = imported()
    assert "raised    user/accumulators: 2 zeros, by which updates divide\n" in text
    assert result["raised"] == {"user/accumulators": 2}
    engine = ps.Engine.restore(tmp_path / "c")
    engine.apply({"user": ([3], [[0.0, 1.0]])})
    assert np.isfinite(engine.lookup("user", [3])).all()
    assert engine.lookup("user", [3])[0, 0] == ARRAYS["user"][3, 0]


def test_other_types_of_floats_are_converted_exactly(tmp_path, imported):
    folder_of(tmp_path / "source", user=ARRAYS["user"].astype(np.float16), item=ARRAYS["item"].astype(np.float64))
    imported()
    np.testing.assert_array_equal(parts_of(tmp_path / "c", "user")["parameters"], ARRAYS["user"].astype(np.float16))
    np.testing.assert_array_equal(parts_of(tmp_path / "c", "item")["parameters"], ARRAYS["item"])


def test_an_exported_checkpoint_is_imported_bit_by_bit(tmp_path, config, imported, call):
    folder_of(tmp_path / "source")
    imported()
    call(0, "export", tmp_path / "c", tmp_path / "out")
    _, result = call(0, "import", tmp_path / "out", tmp_path / "d", "--config", config)
    assert result["tables"]["user"] == {"parameters": "user.row", "accumulators": "user.accumulators"}
    assert call(0, "diff", tmp_path / "c", tmp_path / "d")[1]["equal"]
    shutil.move(tmp_path / "out" / "user.parquet", tmp_path / "out" / "u.parquet")
    text, _ = call(0, "import", tmp_path / "out", tmp_path / "e", "--config", config, "--map", "u=user")
    assert "parameters of 'u.row'" in text
    assert call(0, "diff", tmp_path / "c", tmp_path / "e")[1]["equal"]
    for name in ("u", "item"):
        shutil.move(tmp_path / "out" / f"{name}.parquet", tmp_path / "out" / f"my {name}.parquet")
    maps = "--map", "my *=*", "--map", "my u=user"
    call(0, "import", tmp_path / "out", tmp_path / "f", "--config", config, *maps)
    assert call(0, "diff", tmp_path / "c", tmp_path / "f")[1]["equal"]


@pytest.mark.parametrize(
    "name", ["accumulators", "velocities", "momenta", "sum", "weight", "value", "keys", "a.weight"]
)
def test_a_table_may_be_called_like_a_slot(tmp_path, call, name):
    """All formats name a tensor TABLE/PART, or TABLE.PART."""
    tables = [ps.TableConfig(20, 3, name=each, optimizer=ps.Adam(0.1)) for each in (name, "user")]
    config = ps.EmbeddingConfig.from_tables(tables)
    config.save(tmp_path / "t.pbtxt")
    engine = ps.Engine(config)
    parts = {each: engine.retrieve_parameters(each) for each in (name, "user")}
    for number, rows in enumerate(rows for arrays in parts.values() for rows in arrays.values()):
        rows[:] = rows_of(20, 3, seed=number)
    for dot in (False, True):
        source = tmp_path / f"source{dot}"
        if dot:
            source.mkdir()
            words = {"parameters": "weight"}
            arrays = {f"{each}.{words.get(p, p)}": rows for each, slots in parts.items() for p, rows in slots.items()}
            np.savez(source / "m.npz", **arrays)
            source /= "m.npz"
        else:
            folder_of(source, {f"{each}/{part}": rows for each, slots in parts.items() for part, rows in slots.items()})
        _, result = call(0, "import", source, tmp_path / f"c{dot}", "--config", tmp_path / "t.pbtxt")
        assert result["initial"] == {}
        for each, arrays in parts.items():
            for part, rows in parts_of(tmp_path / f"c{dot}", each).items():
                np.testing.assert_array_equal(rows, arrays[part])


def test_parts_of_a_partitioned_variable_are_to_be_joined(tmp_path, refusal):
    pieces = np.split(ARRAYS["user"], 5)
    arrays = {**ARRAYS, "user": None} | {f"user/part_{number}": rows for number, rows in enumerate(pieces)}
    folder_of(tmp_path / "source", arrays)
    advice = (
        "user/part_0, user/part_1, user/part_2, user/part_3, user/part_4 are the parts of one variable; join them in "
        "the order of the ids (with TensorFlow's partition_strategy 'div': rows = numpy.concatenate(parts); with "
        "'mod': rows[n::5] = parts[n]), and import a folder with them as user.npy"
    )
    assert advice in refusal(3)
    line = refusal(3, "--map", "user/part_0=user")
    assert advice in line
    assert "vocabulary_size" not in line


def test_init_and_read_tables_take_the_same_sources(tmp_path, config, call):
    folder_of(tmp_path / "source")
    log = tmp_path / "log.arrows"
    write(log, [frame(0)])
    call(0, "replay", config, log, "--table", "user", "--init", tmp_path / "source", "--out", tmp_path / "out")
    engine = ps.Engine(ps.EmbeddingConfig.load(config))
    loaded = engine.read_tables(tmp_path / "source", names={"item": "item"})
    assert isinstance(loaded, LoadedTables)
    engine.run(log, table="user")
    other = ps.Engine(ps.EmbeddingConfig.load(config))
    other.read_tables(tmp_path / "out")
    assert [other.lookup(n, range(20)).tobytes() for n in ("user", "item")] == [
        engine.lookup(n, range(20)).tobytes() for n in ("user", "item")
    ]


def test_a_share_takes_its_rows(tmp_path, config):
    folder_of(tmp_path / "source")
    shares = [ps.Engine(ps.EmbeddingConfig.load(config), share=(rank, 2)) for rank in range(2)]
    assert sum(share.read_tables(tmp_path / "source").rows["user"] for share in shares) == 50


def test_keys_of_dynamic_tables_are_taken_with_their_rows(tmp_path, call, refusal):
    table_config = ps.TableConfig(8, 2, name="user", optimizer=ps.SGD(0.1), dynamic=ps.Dynamic())
    ps.EmbeddingConfig.from_tables([table_config]).save(tmp_path / "tables.pbtxt")
    keys = np.array([2**62, -5, 7])
    folder_of(tmp_path / "source", {"user": rows_of(3, 2)})
    assert "table 'user' is dynamic, and there are no keys: 'user/keys'" in refusal(3)
    folder_of(tmp_path / "source", {"user/keys": keys.astype(np.int32)})
    assert "'user/keys': expected int64 of shape (rows,), the key_type of table 'user', got int32" in refusal(3)
    folder_of(tmp_path / "source", {"user/keys": np.array([7, 7, 1])})
    assert "'user/keys': key 7 occurs twice" in refusal(3)
    folder_of(tmp_path / "source", {"user/keys": keys})
    call(0, "import", tmp_path / "source", tmp_path / "c", "--config", tmp_path / "tables.pbtxt")
    np.testing.assert_array_equal(ps.Engine.restore(tmp_path / "c").lookup("user", keys), rows_of(3, 2))
    folder_of(tmp_path / "source", {"user": rows_of(9, 2), "user/keys": np.arange(9)})
    call(5, "import", tmp_path / "source", tmp_path / "d", "--config", tmp_path / "tables.pbtxt")
    assert not (tmp_path / "d").exists()


@pytest.mark.evidence
@pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are Linux's")
def test_a_source_is_read_in_blocks(tmp_path, call):
    """The table has 256 MB, and the process without it less than 230: there is no room for a second copy."""
    rows, dim = 2 * MB, 32
    (tmp_path / "t.pbtxt").write_text(table("user", rows, dim, "stochastic_gradient_descent {}") + "mode: TRAINING\n")
    (tmp_path / "source").mkdir()
    array = np.lib.format.open_memmap(tmp_path / "source" / "user.npy", "w+", np.float32, shape=(rows, dim))
    array[:] = np.arange(rows, dtype=np.float32)[:, None]
    del array
    done = below(
        490 * MB, "import", tmp_path / "source", tmp_path / "c", "--config", tmp_path / "t.pbtxt", "--threads", 1
    )
    assert done.returncode == 0, done.stderr
    done = below(490 * MB, "export", tmp_path / "c", tmp_path / "t.safetensors", "--format", "safetensors")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t.safetensors").stat().st_size > 256 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are Linux's")
def test_a_file_system_that_is_full_is_exit_6_and_leaves_no_commit(tmp_path, config, call):
    folder_of(tmp_path / "source")
    done = below(64 << 30, "import", tmp_path / "source", tmp_path / "c", "--config", config, file_bytes=200)
    assert (done.returncode, done.stderr.count("\n")) == (6, 1), done.stderr
    assert "c/00000001.base: cannot write: file too large; raise the limit on file sizes" in done.stderr
    assert set(os.listdir(tmp_path / "c")) <= {".lock"}
    words = "import", tmp_path / "source", tmp_path / "c", "--config", config
    call(0, *words)
    for form in ("safetensors", "parquet"):
        done = below(64 << 30, "export", tmp_path / "c", tmp_path / form, "--format", form, file_bytes=200)
        assert (done.returncode, done.stderr.count("\n")) == (6, 1), done.stderr
        assert f"{form}" in done.stderr
        assert "cannot write: file too large; raise the limit on file sizes" in done.stderr
        assert [str(path) for path in tmp_path.rglob("*part*")] == []
        assert not (tmp_path / form).is_file()


def test_exported_rows_that_are_not_finite_are_reported_and_refused(tmp_path, config, call, refused):
    """``--out`` and ``export`` say so, ``import`` and ``--init`` refuse them, and a file without them is taken."""
    rows = pa.record_batch({"step": [0, 0], "table": ["user"] * 2, "id": [5, 7], "gradient": [[3e19, 1.0]] * 2})
    log, kept, files = write(tmp_path / "log.arrows", [rows]), tmp_path / "kept", tmp_path / "exported"
    output, report = call(0, "replay", config, log, "--checkpoint", kept, "--out", tmp_path / "tables")
    assert (report["not_finite"], report["first_not_finite"]) == (2, "table 'user', id 5")
    assert "2 rows became infinite or NaN by updates; first: table 'user', id 5" in output
    output, result = call(0, "export", kept, files)
    assert "warning   user: 2 rows infinite or NaN, the first of id 5; import refuses them" in output
    assert result["not_finite"] == {"user": 2}
    for words in (
        ("import", files, tmp_path / "c", "--config", config),
        ("replay", config, log, "--init", tmp_path / "tables"),
    ):
        line = refused(3, *words)
        assert "row 5, column 'accumulators': expected 2 finite floats, got [inf" in line
        assert "2 rows of the file are not finite: leave them out, and they keep their initial values" in line
    table = pq.read_table(files / "user.parquet")
    bad = pc.is_in(table["id"], pa.array([5, 7]))
    pq.write_table(table.filter(pc.invert(bad)), files / "user.parquet")
    assert call(0, "import", files, tmp_path / "c", "--config", config)[1]["rows"] == {"user": 48, "item": 20}


def test_tensors_that_are_not_finite_are_refused_with_their_number(tmp_path, refusal, monkeypatch):
    monkeypatch.setattr("penstock.io.table_formats.tensor_blocks._BLOCK_BYTES", 64)
    rows = rows_of(50, 2)
    rows[[3, 49], 1] = np.nan, np.inf
    folder_of(tmp_path / "source", user=rows)
    line = refusal(3)
    assert "'user', row 3, column 1: expected a number that is finite, got nan; 2 of its rows are not finite" in line
