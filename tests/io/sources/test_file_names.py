"""Globs, the keys of Hive paths, and ids that are strings."""

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from cli import error_line, outcome
from s3_server import serving

import penstock as ps
from penstock.io.sources.opening import open_sources

TABLES = [ps.TableConfig(50, 2, optimizer=ps.SGD(0.1), name=name) for name in ("user", "item")]


def engine():
    return ps.Engine(ps.EmbeddingConfig.from_tables(TABLES))


def rows(step=0, **columns):
    random = np.random.default_rng(step)
    gradient = pa.array(random.normal(size=(6, 2)).astype(np.float32).tolist(), pa.list_(pa.float32(), 2))
    return pa.table({"step": [step] * 6, "id": random.integers(0, 50, 6), "gradient": gradient, **columns})


@pytest.fixture
def folder(tmp_path):
    """Three files of steps 0 to 2, and another kind of file."""
    tmp_path = tmp_path / "logs" / "a log"
    tmp_path.mkdir(parents=True)
    for step in range(3):
        pq.write_table(rows(step, table=["user"] * 6), tmp_path / f"part-{step}.parquet")
    (tmp_path / "notes.txt").write_text("not data")
    return tmp_path


def test_a_glob_stands_for_the_files_that_match_in_order(folder, capsys):
    whole, matched = engine(), engine()
    whole.run([folder / f"part-{step}.parquet" for step in range(3)])
    assert matched.run(f"{folder}/part-*.parquet").frames == 3
    assert matched.state_hash() == whole.state_hash()
    listed = engine()
    assert listed.run([f"{folder}/part-[01].parquet", folder / "part-2.parquet"]).frames == 3
    assert listed.state_hash() == whole.state_hash()
    assert engine().run(f"{folder.parent}/**/part-1.parquet").frames == 1


def test_files_in_folders_that_match_too_are_read_once(folder):
    (folder / "notes.txt").unlink()
    for pattern in ("**", "**/*", "*/*", "*"):
        assert engine().run(f"{folder.parent}/{pattern}").rows == 18


@pytest.mark.parametrize("link", ["file", "hard link", "folder", "loop"])
def test_rows_that_a_link_would_count_twice_are_refused(folder, link):
    (folder / "notes.txt").unlink()
    days = folder.parent
    if link == "hard link":
        (folder / "latest.parquet").hardlink_to(folder / "part-2.parquet")
    elif link == "file":
        (folder / "latest.parquet").symlink_to("part-2.parquet")
    else:
        (days / "latest").symlink_to(folder if link == "folder" else days)
    for source in (days, f"{days}/**/*.parquet", f"{days}/**"):
        with pytest.raises(ps.InputError, match=r"' are the same, and its rows would count twice; give a glob, or"):
            engine().run(source)
    assert engine().run(f"{folder}/part-*.parquet").rows == 18


def test_a_glob_without_matches_and_a_file_of_that_name(folder):
    with pytest.raises(ps.InputError, match=r"x\*\.parquet: no file or directory matches"):
        engine().run(f"{folder}/x*.parquet")
    (folder / "part-0.parquet").rename(folder / "part-[1].parquet")
    assert engine().run(folder / "part-[1].parquet").rows == 6


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_glob_skips_the_marks_that_a_directory_skips(folder, scheme):
    (folder / "notes.txt").unlink()
    (folder / "_temporary").mkdir()
    for name in ("_SUCCESS", "_committed_17", ".part-0.parquet.crc", "_temporary/part-9.parquet"):
        (folder / name).touch()
    uri = f"{scheme}{folder}".replace(" ", "%20" if scheme else " ")
    for source in (uri, f"{uri}/*", f"{uri}/**", f"{scheme}{folder.parent}/*/*"):
        assert engine().run(source).rows == 18
    (folder / "part-0.parquet").rename(folder / "_part-0.parquet")
    assert engine().run(f"{uri}/_part*").rows == 6  # a glob that names them
    (folder / "_delta_log").mkdir()
    (folder / "_delta_log" / "0.json").touch()
    for source in (uri, f"{uri}/*"):
        with pytest.raises(ps.PenstockError, match=r"is a table with versions|_delta_log"):
            engine().run(source)


def test_the_command_line_takes_globs(folder, capsys):
    ps.EmbeddingConfig.from_tables(TABLES).save(folder / "tables.pbtxt")
    for command in ("replay", "validate"):
        code, report, _ = outcome(capsys, command, folder / "tables.pbtxt", f"{folder}/*.parquet")
        assert (command, code, report["rows"]) == (command, 0, 18)
    assert "no file or directory matches" in error_line(
        capsys, 3, "replay", folder / "tables.pbtxt", f"{folder}/*.arrow"
    )


def test_a_glob_in_a_uri(folder):
    uri = folder.parent.as_uri()
    assert [source.name for source in open_sources(f"{uri}/*/*.parquet")] == [
        f"{uri}/a%20log/part-{n}.parquet" for n in range(3)
    ]
    assert engine().run(f"{uri}/**/part-*.parquet").frames == 3
    with pytest.raises(ps.InputError, match="no file or directory matches"):
        engine().run(f"{uri}/*/*.nothing")


def test_a_glob_in_a_bucket(folder):
    with serving() as create:
        bucket = create("globs")
        for step in range(2):
            bucket.write(f"part-{step}.parquet", (folder / f"part-{step}.parquet").read_bytes())
        assert engine().run(bucket.uri.replace("runs/a?", "runs/*/part-*.parquet?")).frames == 2


@pytest.fixture
def partitioned(tmp_path):
    """A dataset in Hive's folders, by table and step, and the same rows as one table, in the order of the folders."""
    tables = []
    for name in ("item", "user"):
        for step in range(2):
            table = rows(step).drop_columns("step")
            (tmp_path / f"table={name}" / f"step={step}").mkdir(parents=True)
            pq.write_table(table, tmp_path / f"table={name}" / f"step={step}" / "0.parquet")
            tables.append(
                table.append_column("step", pa.array([step] * 6)).append_column("table", pa.array([name] * 6))
            )
    return tmp_path, pa.concat_tables(tables)


def test_the_keys_of_hive_paths_are_columns(partitioned):
    folder, table = partitioned
    whole, read, dataset, merged = engine(), engine(), engine(), engine()
    whole.run(table)
    report = read.run(folder)
    assert (report.frames, report.stale, report.notes[1:]) == (4, 2, ())  # the users' steps come after the items'
    dataset.run(ds.dataset(folder, partitioning="hive"))
    assert read.state_hash() == whole.state_hash() == dataset.state_hash()
    report = merged.run(f"{folder}/table=*", merge="step")
    assert report.frames == 4


def test_the_note_about_a_file_per_table_names_the_flags_that_make_one_step_of_them(tmp_path, capsys):
    whole = []
    for name in ("item", "user"):
        (tmp_path / "log" / f"table={name}").mkdir(parents=True)
        steps = [rows(step) for step in range(4)]
        pq.write_table(pa.concat_tables(steps), tmp_path / "log" / f"table={name}" / "0.parquet")
        whole.append([step.append_column("table", pa.array([name] * 6)) for step in steps])
    log = pa.concat_tables(part for step in zip(*whole, strict=True) for part in step)
    pq.write_table(log, tmp_path / "whole.parquet")
    engine().config.save(tmp_path / "tables.pbtxt")
    expected = outcome(capsys, "replay", tmp_path / "tables.pbtxt", tmp_path / "whole.parquet")[1]
    _, report, _ = outcome(capsys, "replay", tmp_path / "tables.pbtxt", tmp_path / "log")
    advice = "--merge step; if each of N files has one table, both, with the files as sources (DIR/*/* in place of DIR)"
    assert (report["stale"], report["notes"][0].endswith(advice)) == (4, True)
    flags = ("--merge", "step", "--num-required", 2)
    _, report, _ = outcome(capsys, "replay", tmp_path / "tables.pbtxt", tmp_path / "log" / "*" / "*", *flags)
    assert (report["stale"], report["steps"], report["state_hash"]) == (0, 4, expected["state_hash"])


def test_a_key_that_is_a_column_of_the_file_is_not_added(tmp_path):
    (tmp_path / "table=item" / "x=__HIVE_DEFAULT_PARTITION__").mkdir(parents=True)
    pq.write_table(rows(table=["user"] * 6), tmp_path / "table=item" / "x=__HIVE_DEFAULT_PARTITION__" / "0.parquet")
    report = engine().run(tmp_path)
    assert (report.tables["user"].rows, report.tables["item"].rows) == (6, 0)
    assert report.notes == ("columns that were not read: x",)


def test_values_are_decoded_and_integers_only_where_all_are(tmp_path):
    for value in ("1", "b%2Fc"):
        (tmp_path / f"contributor={value}").mkdir()
        pq.write_table(rows(table=["user"] * 6), tmp_path / f"contributor={value}" / "0.parquet")
    waiting = ps.Engine(ps.EmbeddingConfig.from_tables(TABLES), num_required=3)
    waiting.run(tmp_path)
    assert waiting.gate.explain().count("'b/c'") == 1


# ---- strings as ids


def keyed(key_type="int64"):
    dynamic = ps.Dynamic(key_type=key_type, missing="zero")
    return ps.EmbeddingConfig.from_tables([ps.TableConfig(100, 2, optimizer=ps.SGD(0.1), name="user", dynamic=dynamic)])


TEXT_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
BYTE_TYPES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]
NAMES = ["alice", "bob", "", "ålesund", "alice", "x" * 300]


@pytest.mark.parametrize("key_type", ["int64", "uint64"])
@pytest.mark.parametrize("kind", [*TEXT_TYPES, *BYTE_TYPES], ids=str)
def test_strings_are_ids_by_their_hashes(key_type, kind):
    hashes = ps.hash_ids(NAMES)
    assert hashes.dtype == np.int64
    assert (hashes >= 0).all()
    numbers, strings = ps.Engine(keyed(key_type)), ps.Engine(keyed(key_type))
    column = pa.array(hashes) if key_type == "int64" else pa.array(hashes.astype(np.uint64))
    numbers.run(rows().set_column(1, "id", column))
    report = strings.run(rows().set_column(1, "id", pa.array(NAMES).cast(kind)), hash_ids=True)
    assert report.rows == 6
    assert strings.state_hash() == numbers.state_hash()


def test_a_null_string_is_a_null_id():
    for kind in (pa.string(), pa.binary_view()):
        column = pa.array([*NAMES[:5], None], kind)
        with pytest.raises(ps.InputError, match="expected an id, got null"):
            ps.Engine(keyed()).run(rows().set_column(1, "id", column), hash_ids=True)


def test_strings_without_the_flag_and_the_flag_without_dynamic_tables(capsys):
    with pytest.raises(ps.InputError, match="expected any integer type, got string; --hash-ids hashes strings"):
        ps.Engine(keyed()).run(rows().set_column(1, "id", pa.array(NAMES)))
    with pytest.raises(ps.UsageError, match="keys of dynamic tables, and the configuration has none"):
        engine().run(rows(), hash_ids=True)


# BLAKE2b of 8 bytes over "a" and "ccc", without the highest bit.
KEYS = [3405396810240292928, 9179805422643084489]
TEXTS, BYTES = ["a", "ccc"], [b"a", b"ccc"]


@pytest.mark.parametrize(
    "create",
    [
        lambda: TEXTS,
        lambda: BYTES,
        lambda: ["a", b"ccc"],
        lambda: iter(TEXTS),
        lambda: np.array(TEXTS),
        lambda: np.array(TEXTS).astype(">U7"),
        lambda: np.array(TEXTS, np.dtypes.StringDType()),
        lambda: np.array(BYTES),
        lambda: np.array([b"ccc", b"a"])[::-1],
        lambda: np.array(BYTES, object),
        lambda: pa.array(TEXTS, pa.string_view()),
        lambda: pa.array(BYTES),
        lambda: pa.array(BYTES, pa.binary_view()),
        lambda: pa.array([None, *TEXTS]).dictionary_encode()[1:],
        lambda: pa.chunked_array([TEXTS[:1], TEXTS[1:]]),
    ],
)
def test_a_text_has_the_same_key_in_arrays_of_any_kind(create):
    assert ps.hash_ids(create()).tolist() == KEYS


def test_keys_of_other_bytes():
    assert ps.hash_ids([b"\xff"]).tolist() == ps.hash_ids(pa.array([b"\xff"], pa.binary(1))).tolist()
    assert len({*ps.hash_ids(["a", "a\0", ""]).tolist()}) == 3
    assert ps.hash_ids([]).shape == ps.hash_ids(pa.array([])).shape == ps.hash_ids(np.array([], "S1")).shape == (0,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2], ", got int64"),
        (["a", 1], ".*'int'"),
        (["a", None], " without nulls, got 1 nulls"),
        (["a", float("nan")], " without nulls, got 1 nulls"),
        (pa.array(["a", None]), " without nulls, got 1 nulls"),
        (np.array(["a", None], np.dtypes.StringDType(na_object=None)), " without nulls, got 1 nulls"),
        (pa.array([1]), ", got int64"),
        (np.array([["a"]]), r".*shape \(1, 1\)"),
        ("alice", ": got one str; give a list of them"),
        (b"alice", ": got one bytes; give a list of them"),
        (["\udcff"], ".*surrogates not allowed"),
        (np.ma.array(TEXTS, mask=[0, 1]), ": got a masked array"),
    ],
)
def test_values_that_are_no_strings_have_no_keys(values, message):
    with pytest.raises(ps.InputError, match=f"hash_ids: expected strings{message}"):
        ps.hash_ids(values)


def test_strings_of_an_example_stream():
    dynamic = ps.Dynamic(missing="zero")
    table = ps.TableConfig(100, 2, optimizer=ps.SGD(0.1), name="user", dynamic=dynamic, combiner="sum")
    config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(table, name="clicked")}, batch_size=2)

    def examples(ids):
        struct = pa.StructArray.from_arrays(
            [ids, pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))], names=["ids", "gradient"]
        )
        return pa.record_batch({"clicked": struct})

    numbers, strings = ps.Engine(config), ps.Engine(config)
    numbers.run([examples(pa.array([ps.hash_ids(["a", "b"]).tolist(), ps.hash_ids(["a"]).tolist()]))])
    strings.run([examples(pa.array([["a", "b"], ["a"]]))], hash_ids=True)
    assert strings.state_hash() == numbers.state_hash()
