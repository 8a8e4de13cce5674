"""Rows that start from the vectors of a file: bit for bit, until a gradient changes them; and files that do not fit."""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli import error_line, outcome

import penstock as ps

ROWS, DIM = 40, 4
VECTORS = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
# Other ids than those of a step, in no order.
KEYS = np.random.default_rng(1).permutation(np.arange(ROWS, dtype=np.int64) * 10**15 - 10**15)


def parquet(path, ids, vectors, kind=None):
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1), kind or pa.float32()), vectors.shape[1])
    pq.write_table(pa.table({"id": ids, "row": lists}), path)
    return path


def config_of(path, *, rows=ROWS, dim=DIM, **more):
    word = ps.TableConfig(rows, dim, ps.FromFile(path), ps.Adagrad(0.1), name="word", **more)
    return ps.EmbeddingConfig.from_tables([word])


def same(rows, vectors):
    assert rows.tobytes() == np.ascontiguousarray(vectors, np.float32).tobytes()


@pytest.fixture
def keyed(tmp_path):
    return parquet(tmp_path / "vectors.parquet", KEYS, VECTORS)


def apply(engine, keys):
    engine.apply({"word": (keys, np.ones((len(keys), DIM), np.float32))})


@pytest.mark.parametrize("ids", [np.arange(ROWS), np.arange(ROWS)[::-1], np.arange(0, ROWS, 3)])
def test_a_row_starts_from_its_vector_and_others_from_zeros(tmp_path, ids):
    engine = ps.Engine(config_of(parquet(tmp_path / "v.parquet", ids, VECTORS[ids])))
    expected = np.zeros((ROWS, DIM), np.float32)
    expected[ids] = VECTORS[ids]
    same(engine.lookup("word", range(ROWS)), expected)
    apply(engine, [3, 7])
    untouched = [row for row in range(ROWS) if row not in (3, 7)]
    same(engine.lookup("word", untouched), expected[untouched])
    assert (engine.lookup("word", [3]) != expected[3]).all()


def test_an_import_says_that_it_has_replaced_the_vectors(tmp_path):
    config, path = (
        config_of(parquet(tmp_path / "v.parquet", np.arange(ROWS), VECTORS), trainable=False),
        tmp_path / "n.npz",
    )
    np.savez(path, other=VECTORS + 1)
    engine = ps.Engine(config)
    (note,) = engine.read_tables(path, names={"other": "word"}).notes
    assert note == (
        f"table 'word': the rows of 'other' have replaced the vectors of {tmp_path}/v.parquet, which it starts from"
    )
    same(engine.lookup("word", range(ROWS)), VECTORS + 1)


def test_numpy_files_name_rows_by_their_place(tmp_path):
    np.save(tmp_path / "v.npy", VECTORS[:30])
    same(ps.Engine(config_of(tmp_path / "v.npy")).lookup("word", range(30)), VECTORS[:30])
    np.savez(tmp_path / "two.npz", word=VECTORS, other=VECTORS[:1])
    same(ps.Engine(config_of(tmp_path / "two.npz")).lookup("word", range(ROWS)), VECTORS)
    np.savez(tmp_path / "keys.npz", rows=VECTORS, keys=KEYS)
    same(ps.Engine(config_of(tmp_path / "keys.npz", dynamic=ps.Dynamic())).lookup("word", KEYS), VECTORS)


def test_what_a_table_has_written_starts_another(tmp_path):
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([ps.TableConfig(ROWS, DIM, name="word", optimizer=ps.SGD())]))
    (path,) = engine.write_tables(tmp_path)
    same(ps.Engine(config_of(path)).lookup("word", range(ROWS)), engine.lookup("word", range(ROWS)))


@pytest.mark.parametrize("kind", ["int64", "uint64"])
def test_a_key_reads_its_vector_before_admission_and_after_eviction(tmp_path, kind):
    keys = KEYS.astype(kind)
    path = parquet(tmp_path / "v.parquet", keys, VECTORS)
    config = config_of(path, rows=8, dynamic=ps.Dynamic(min_count=2, evict="lru", key_type=kind))
    engine = ps.Engine(config)
    same(engine.lookup("word", keys), VECTORS)
    apply(engine, keys[:3])  # not admitted yet
    same(engine.lookup("word", keys), VECTORS)
    apply(engine, keys[:3])
    assert len(engine.keys("word")) == 3
    assert (engine.lookup("word", keys[:3]) != VECTORS[:3]).any(axis=1).all()
    same(engine.lookup("word", keys[3:]), VECTORS[3:])
    for first in range(3, 39, 3):
        apply(engine, np.repeat(keys[first : first + 3], 2))
    same(engine.lookup("word", keys[:3]), VECTORS[:3])
    other = np.array([77], kind)
    same(engine.lookup("word", other), np.zeros((1, DIM)))
    apply(engine, np.repeat(other, 2))


def test_a_key_that_arrives_later_starts_from_its_vector(keyed):
    engine = ps.Engine(config_of(keyed, dynamic=ps.Dynamic()))
    apply(engine, KEYS[:1])
    first = engine.lookup("word", KEYS[:1]) - VECTORS[:1]
    for _ in range(3):
        apply(engine, [5])
    engine.apply({"word": (KEYS[9:10], np.zeros((1, DIM), np.float32))})
    same(engine.lookup("word", KEYS[9:10]), VECTORS[9:10])
    apply(engine, KEYS[4:5])
    np.testing.assert_allclose(engine.lookup("word", KEYS[4:5]) - VECTORS[4:5], first, atol=1e-6)


@pytest.mark.parametrize("more", [{}, {"placement": ps.Placement("host")}, {"trainable": False}])
@pytest.mark.parametrize("dynamic", [None, ps.Dynamic()])
def test_a_resumed_engine_has_the_bits(tmp_path, more, dynamic):
    ids = np.arange(ROWS) if dynamic is None else KEYS
    config = config_of(parquet(tmp_path / "v.parquet", ids, VECTORS), dynamic=dynamic, **more)
    engine = ps.Engine(config)
    apply(engine, ids[:3])
    engine.save(tmp_path / "state")
    again = ps.Engine.restore(tmp_path / "state")
    assert again.state_hash() == engine.state_hash()
    same(again.lookup("word", ids), engine.lookup("word", ids))
    same(again.lookup("word", ids[3:]), VECTORS[3:])
    for each in (engine, again):
        apply(each, ids[2:6])
    assert again.state_hash() == engine.state_hash()


@pytest.mark.parametrize("dynamic", [None, ps.Dynamic()])
def test_shares_have_the_rows_of_the_whole(tmp_path, dynamic):
    ids = np.arange(ROWS) if dynamic is None else KEYS
    config = config_of(parquet(tmp_path / "v.parquet", ids, VECTORS), dynamic=dynamic)
    for rank in range(3):
        share = ps.Engine(config, share=(rank, 3))
        own = [row for row, owner in enumerate(share.core.tables.held.shares["word"].locate(ids)[0]) if owner == rank]
        same(share.lookup("word", ids[own]), VECTORS[own])


def test_a_cached_table_has_the_bits(tmp_path):
    path = parquet(tmp_path / "v.parquet", np.arange(ROWS), VECTORS)
    hashes = []
    for placement in (ps.Placement("host"), ps.Placement("cached", device_bytes=100)):
        engine = ps.Engine(config_of(path, placement=placement))
        apply(engine, [1, 2, 3])
        hashes.append(engine.state_hash())
    assert len(set(hashes)) == 1


def test_a_rollback_gives_a_key_its_vector_back(tmp_path, keyed):
    engine = ps.Engine(config_of(keyed, dynamic=ps.Dynamic()))
    rows = {"step": [0, 1], "id": KEYS[:2], "gradient": [[1.0] * DIM] * 2}
    engine.run(pa.table(rows).slice(0, 1), checkpoint=tmp_path / "state")
    engine.tag("one")
    engine.run(pa.table(rows), checkpoint=tmp_path / "state", resume=True)
    assert (engine.lookup("word", KEYS[1:2]) != VECTORS[1:2]).any()
    engine.rollback("one")
    same(engine.lookup("word", KEYS[1:]), VECTORS[1:])


def test_readers_of_other_processes_read_the_vectors_of_keys_without_a_row(tmp_path, keyed):
    engine = ps.Engine(config_of(keyed, dynamic=ps.Dynamic()), shared=tmp_path / "shared")
    apply(engine, KEYS[:2])
    code = (
        "import sys, numpy, penstock; keys = numpy.frombuffer(sys.stdin.buffer.read(), numpy.int64); "
        "sys.stdout.buffer.write(penstock.Reader(sys.argv[1]).lookup('word', keys).tobytes())"
    )

    def read():
        return subprocess.run(
            [sys.executable, "-c", code, tmp_path / "shared"], input=KEYS.tobytes(), capture_output=True, check=False
        )

    assert read().stdout == engine.lookup("word", KEYS).tobytes()
    same(engine.lookup("word", KEYS[2:]), VECTORS[2:])
    os.truncate(keyed, keyed.stat().st_size - 1)
    problem = read().stderr.decode().strip().splitlines()[-1]
    assert problem.startswith(
        "penstock.base.errors.StateError: table 'word' needs the vectors that its rows start from"
    )
    assert "vectors.parquet has changed" in problem


def test_a_table_of_16_bits_starts_from_rounded_vectors(keyed, tmp_path):
    ids = np.arange(ROWS)
    static = ps.Engine(config_of(parquet(tmp_path / "v.parquet", ids, VECTORS), dtype="bfloat16"))
    dynamic = ps.Engine(config_of(keyed, dtype="bfloat16", dynamic=ps.Dynamic()))
    same(static.lookup("word", ids), dynamic.lookup("word", KEYS))
    np.testing.assert_allclose(static.lookup("word", ids), VECTORS, rtol=2**-8)


def test_a_renamed_table_keeps_the_tensor_of_its_first_name(tmp_path):
    np.savez(tmp_path / "v.npz", word=VECTORS, other=VECTORS[:1])
    ps.Engine(config_of(tmp_path / "v.npz", trainable=False)).save(tmp_path / "state")
    new = ps.TableConfig(ROWS, DIM, ps.FromFile(tmp_path / "v.npz"), name="token", trainable=False)
    engine = ps.Engine.restore(
        tmp_path / "state", config=ps.EmbeddingConfig.from_tables([new]), rename={"word": "token"}
    )
    same(engine.lookup("token", range(ROWS)), VECTORS)


# ---- files that do not fit


def wrong(tmp_path, name):
    ids, path = np.arange(ROWS), tmp_path / "v.parquet"
    if name == "missing":
        return path
    if name == "a URI":
        return "s3://bucket/vectors.parquet"
    if name == "a folder":
        path.mkdir()
    elif name == "text":
        path = tmp_path / "v.txt"
        path.write_text("king 0.1 0.2 0.3 0.4\n")
    elif name == "no tensor of its name":
        path = tmp_path / "v.npz"
        np.savez(path, a=VECTORS, b=VECTORS)
    elif name in ("another dim of a tensor", "more rows of a tensor", "NaN in a tensor", "float16 in a tensor"):
        path = tmp_path / "v.npy"
        vectors = np.vstack([VECTORS, VECTORS[:1]]) if name.startswith("more") else VECTORS.copy()
        vectors = vectors[:, :3] if "dim" in name else vectors
        if "NaN" in name:
            vectors[5, 1] = np.nan
        np.save(path, vectors.astype(np.float16) if "float16" in name else vectors)
    elif name == "no column of vectors":
        pq.write_table(pa.table({"id": ids, "vector": VECTORS.tolist()}), path)
    elif name == "float64":
        parquet(path, ids, VECTORS, pa.float64())
    elif name == "another dim":
        parquet(path, ids, VECTORS[:, :3])
    elif name == "an id twice":
        parquet(path, np.r_[ids[:-1], 0], VECTORS)
    elif name == "an id beyond":
        parquet(path, ids + 1, VECTORS)
    elif name == "NaN":
        vectors = VECTORS.copy()
        vectors[5, 1] = np.nan
        parquet(path, ids, vectors)
    elif name == "truncated":
        parquet(path, ids, VECTORS)
        os.truncate(path, path.stat().st_size - 20)
    return path


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing", "cannot be read: No such file or directory"),
        ("a folder", "expected a file of vectors"),
        ("a URI", "expected a path of this machine, got a URI"),
        ("text", "vectors in text, as GloVe writes them"),
        (
            "no tensor of its name",
            "expected one tensor of vectors, or one that is named like table 'word'; there: a, b",
        ),
        ("another dim of a tensor", "expected shape (at most 40, 4), got (40, 3)"),
        ("more rows of a tensor", "expected shape (at most 40, 4), got (41, 4)"),
        ("NaN in a tensor", "expected a number that is finite, got nan"),
        ("float16 in a tensor", "expected float32, got float16"),
        ("no column of vectors", "no column 'row'"),
        ("float64", "expected float32, got double; convert the vectors first"),
        ("another dim", "expected 4 finite floats, got 3"),
        ("an id twice", "id 0 occurs twice"),
        ("an id beyond", "vocabulary_size of table 'word'"),
        ("NaN", "expected 4 finite floats, got"),
        ("truncated", "cannot be read as Parquet"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(tmp_path, name, problem):
    path = wrong(tmp_path, name)
    with pytest.raises(ps.InputError) as raised:
        ps.Engine(config_of(path))
    assert str(raised.value).startswith(f"{path}:")
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_dynamic_table_needs_keys(tmp_path):
    np.save(tmp_path / "v.npy", VECTORS)
    with pytest.raises(ps.InputError, match="table 'word' is dynamic: expected also a tensor 'keys' of int64"):
        ps.Engine(config_of(tmp_path / "v.npy", dynamic=ps.Dynamic()))


@pytest.mark.parametrize("dynamic", [None, ps.Dynamic()])
@pytest.mark.parametrize("change", ["changed", "gone"])
def test_a_commit_needs_its_vectors(tmp_path, dynamic, change):
    path = parquet(tmp_path / "v.parquet", np.arange(ROWS), VECTORS)
    ps.Engine(config_of(path, dynamic=dynamic)).save(tmp_path / "state")
    if change == "gone":
        path.rename(tmp_path / "moved.parquet")
    else:
        parquet(path, np.arange(ROWS), VECTORS + 1)
    with pytest.raises(ps.StateError) as raised:
        ps.Engine.restore(tmp_path / "state")
    problem = "No such file or directory" if change == "gone" else "has changed"
    for text in ("table 'word' needs the vectors that its rows start from", str(path), problem):
        assert text in str(raised.value)
    assert "\n" not in str(raised.value)
    if change == "gone":  # the same bytes elsewhere are the same vectors
        engine = ps.Engine.restore(tmp_path / "state", config=config_of(tmp_path / "moved.parquet", dynamic=dynamic))
        same(engine.lookup("word", range(ROWS)), VECTORS)


def test_a_commit_needs_its_initializer(tmp_path):
    path = parquet(tmp_path / "v.parquet", np.arange(ROWS), VECTORS)
    drawn = ps.EmbeddingConfig.from_tables([ps.TableConfig(ROWS, DIM, name="word", optimizer=ps.Adagrad(0.1))])
    ps.Engine(config_of(path)).save(tmp_path / "state")
    with pytest.raises(ps.StateError, match=r"table 'word' starts from vectors of .*v\.parquet; give it the init"):
        ps.Engine.restore(tmp_path / "state", config=drawn)
    ps.Engine(drawn).save(tmp_path / "drawn")
    with pytest.raises(ps.StateError, match="table 'word' starts from other rows than vectors of a file"):
        ps.Engine.restore(tmp_path / "drawn", config=config_of(path))


@pytest.mark.parametrize("dynamic", [None, ps.Dynamic()])
def test_a_table_starts_anew_from_other_vectors_by_name(tmp_path, dynamic, caplog):
    path = parquet(tmp_path / "v.parquet", np.arange(ROWS), VECTORS)
    engine = ps.Engine(config_of(path, dynamic=dynamic))
    engine.run(pa.table({"step": [0], "id": [3], "gradient": [[1.0] * DIM]}), checkpoint=tmp_path / "state")
    parquet(path, np.arange(ROWS), VECTORS + 1)
    with pytest.raises(ps.StateError, match=r"has changed.*or --reset-table word to start it with its initial rows"):
        ps.Engine.restore(tmp_path / "state")
    engine = ps.Engine.restore(tmp_path / "state", reset_table=["word"])
    same(engine.lookup("word", range(ROWS)), VECTORS + 1)
    assert "change 1 of the tables, at step 1: 'word' started anew" in caplog.text
    apply(engine, [5])
    engine.save(tmp_path / "state")
    same(ps.Engine.restore(tmp_path / "state").lookup("word", range(5)), VECTORS[:5] + 1)
    with pytest.raises(ps.StateError, match="table 'word' starts from other vectors there"):
        engine.rollback(1)


def test_a_relative_path_is_of_the_folder_that_the_engine_ran_in(tmp_path, keyed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = ps.Engine(config_of(keyed.name, dynamic=ps.Dynamic()))
    engine.save(tmp_path / "state")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    same(ps.Engine.restore(tmp_path / "state").lookup("word", KEYS), VECTORS)
    same(engine.lookup("word", KEYS), VECTORS)


def test_a_killed_run_is_resumed_with_the_same_bits(tmp_path, keyed):
    config = config_of(keyed, dynamic=ps.Dynamic(min_count=2, evict="lru"), rows=8)
    rng = np.random.default_rng(3)
    ids = KEYS[rng.integers(0, ROWS, 60)]
    log = pa.table({"step": np.arange(60) // 4, "id": ids, "gradient": rng.normal(size=(60, DIM)).tolist()})
    whole = ps.Engine(config)
    whole.run(log)
    ps.Engine(config).run(log, limit=7, checkpoint=tmp_path / "state", every=3)
    again = ps.Engine.restore(tmp_path / "state")
    again.run(log, checkpoint=tmp_path / "state", every=3, resume=True)
    assert again.state_hash() == whole.state_hash()
    same(again.lookup("word", KEYS), whole.lookup("word", KEYS))
    absent = np.setdiff1d(KEYS, whole.keys("word"))
    same(again.lookup("word", absent), VECTORS[[list(KEYS).index(key) for key in absent]])


def test_a_table_whose_optimizer_replaces_the_vectors_is_refused(keyed):
    table = ps.TableConfig(ROWS, DIM, ps.FromFile(keyed), ps.FTRL(0.1), name="word", dynamic=ps.Dynamic())
    with pytest.raises(ps.ConfigError, match="the first update of a row would replace its initial vector") as raised:
        ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    assert "\n" not in str(raised.value)


def test_the_commands_end_with_one_line(tmp_path, keyed, capsys):
    config_of(keyed, dynamic=ps.Dynamic()).save(tmp_path / "tables.pbtxt")
    assert f'from: "{keyed}"' in (tmp_path / "tables.pbtxt").read_text()
    rows = pa.table({"step": [0], "id": KEYS[:1], "gradient": [[1.0] * DIM]})
    pq.write_table(rows, tmp_path / "log.parquet")
    words = ["replay", tmp_path / "tables.pbtxt", tmp_path / "log.parquet", "--checkpoint", tmp_path / "state"]
    assert outcome(capsys, *words)[0] == 0
    keyed.unlink()
    assert str(keyed) in error_line(capsys, 5, *words, "--resume")
    assert str(keyed) in error_line(capsys, 3, *words[:-1], tmp_path / "other")


def test_inspect_names_the_vectors(tmp_path, keyed, capsys):
    config = config_of(keyed, dynamic=ps.Dynamic())
    config.save(tmp_path / "tables.pbtxt")
    code, result, text = outcome(capsys, "inspect", tmp_path / "tables.pbtxt")
    assert (code, result["tables"][0]["initial"]) == (0, str(keyed))
    assert f"starts from {keyed}" in text
    ps.Engine(config).save(tmp_path / "state")
    assert "starts from vectors" in outcome(capsys, "inspect", tmp_path / "state")[2]
