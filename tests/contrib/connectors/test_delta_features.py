"""What other writers of Delta Lake write: features of the protocol, paths of clones, and partitions."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from lakehouse import FRAMES, Delta, rows_of
from services import config_of, replayed

import penstock as ps
from penstock.base.errors import InputError, StateError

READ = ["timestampNtz", "typeWidening", "v2Checkpoint", "vacuumProtocolCheck", "variantType", "deletionVectors"]
VECTOR = {
    "storageType": "u",
    "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^",
    "offset": 4,
    "sizeInBytes": 40,
    "cardinality": 2,
}


@pytest.fixture
def table(tmp_path):
    table = Delta(tmp_path)
    table.append([0, 1])
    return table


def protocol(*features, reader=3):
    names = {"readerFeatures": [*features], "writerFeatures": [*features]} if reader >= 3 else {}
    return {"protocol": {"minReaderVersion": reader, "minWriterVersion": 7 if reader >= 3 else 5, **names}}


def with_mapping(table, mode="name"):
    (metadata,) = table.actions("metaData")
    schema = json.loads(metadata["schemaString"])
    for number, field in enumerate(schema["fields"]):
        field["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": field["name"]}
    settings = {"configuration": {"delta.columnMapping.mode": mode}, "schemaString": json.dumps(schema)}
    return {"metaData": {**metadata, **settings}}


def check_refused(table, message, num_frames=2):
    """Check that a replay applies the versions before one that is refused."""
    engine = ps.Engine(config_of())
    with pytest.raises(InputError, match=message):
        engine.run(table.spelling)
    assert engine.state_hash() == replayed(FRAMES[:num_frames]).state_hash()


def check_read(table, num_frames):
    engine = ps.Engine(config_of())
    assert engine.run(table.spelling).frames == num_frames
    assert engine.state_hash() == replayed(FRAMES[:num_frames]).state_hash()


def test_features_that_change_no_rows_are_read(table):
    table.commit(protocol(*READ, "columnMapping"), table.add([2]))
    table.commit(table.add([3], "other.parquet"), {"cdc": {"path": "c", "size": 1, "dataChange": False}})
    check_read(table, 4)


def test_rows_that_a_deletion_vector_deletes_are_not_applied(table):
    table.commit(protocol("deletionVectors"), table.add([2]))
    table.commit(table.add([3], "other.parquet", deletionVector=VECTOR))
    check_refused(table, "version 2 uses the feature 'deletionVectors' of Delta Lake, which is not read", 3)


@pytest.mark.parametrize(
    ("actions", "feature"),
    [
        ([protocol("unheard", "deletionVectors")], "unheard"),
        ([protocol("catalogManaged")], "catalogManaged"),
        ([protocol(reader=4)], "minReaderVersion 4"),
    ],
    ids=["unknown", "catalog", "newer"],
)
def test_an_unknown_feature_is_refused_by_name_after_the_versions_before_it(table, actions, feature):
    table.commit(*actions, table.add([2]))
    table.commit(table.add([3], "other.parquet"))
    check_refused(table, f"version 1 uses the feature '{feature}' of Delta Lake")


def test_a_first_version_with_an_unknown_feature_names_it(table, tmp_path, refused):
    config_of().save(tmp_path / "tables.pbtxt")
    log = Path(table.path, "_delta_log", f"{0:020d}.json")
    log.write_text(log.read_text().replace('"minReaderVersion":1', '"minReaderVersion":9'))
    line = refused(3, "replay", tmp_path / "tables.pbtxt", table.spelling)
    assert line.startswith(f"penstock: {table.spelling}: version 0 uses the feature 'minReaderVersion 9' of Delta Lake")


def test_a_feature_that_comes_while_a_replay_follows_ends_it(table, tmp_path):
    def commit(*_):
        if engine.global_step == 2:
            table.commit(table.add([2]))
            table.commit(protocol("unheard"))

    engine = ps.Engine(config_of())
    with pytest.raises(InputError, match="version 2 uses the feature 'unheard' of Delta Lake"):
        engine.run(table.spelling, follow=True, checkpoint=tmp_path / "c", progress=commit)
    assert ps.Engine.restore(tmp_path / "c").state_hash() == replayed(FRAMES[:3]).state_hash()


def test_columns_that_are_mapped_are_refused_also_after_the_version_that_maps_them(table, tmp_path):
    ps.Engine(config_of()).run(table.spelling, checkpoint=tmp_path / "c")
    table.commit(protocol(reader=2), with_mapping(table, "none"), table.add([2]))
    engine = ps.Engine.restore(tmp_path / "c")
    engine.run(table.spelling, checkpoint=tmp_path / "c", resume=True)
    assert engine.state_hash() == replayed(FRAMES[:3]).state_hash()
    table.commit(with_mapping(table))
    table.commit(table.add([3], "other.parquet"))
    check_refused(table, "version 2 uses the feature 'columnMapping'", 3)


def test_columns_that_were_mapped_before_the_position_are_refused(table, tmp_path):
    table.append([2])
    ps.Engine(config_of()).run(table.spelling, checkpoint=tmp_path / "c")
    log = Path(table.path, "_delta_log", f"{0:020d}.json")
    log.write_text(log.read_text().replace('"configuration":{}', '"configuration":{"delta.columnMapping.mode":"id"}'))
    table.append([3])
    with pytest.raises(InputError, match="version 1 uses the feature 'columnMapping'"):
        ps.Engine.restore(tmp_path / "c").run(table.spelling, checkpoint=tmp_path / "c", resume=True)


@pytest.mark.parametrize("form", ["encoded", "absolute", "file:{}", "file://{}", "FILE://{}"])
def test_paths_are_those_of_the_protocol(table, tmp_path, form):
    path = "a folder/100%25/step=2/x.parquet"
    add = table.add([2], path, path.replace("%", "%25").replace(" ", "%20"))
    if form != "encoded":
        elsewhere = tmp_path / "else where" / "y.parquet"
        elsewhere.parent.mkdir()
        shutil.move(Path(table.path, path), elsewhere)
        add["add"]["path"] = form.replace("absolute", "{}").format(str(elsewhere).replace(" ", "%20"))
    table.commit(add)
    check_read(table, 3)


def test_a_shallow_clone_is_read(table, tmp_path):
    clone = Delta(tmp_path / "clone")
    Path(clone.path, "_delta_log").mkdir(parents=True)
    (add,) = table.actions("add")
    names = {"path": f"file:{table.path}/{add['path']}", "dataChange": False}
    clone.commit({"protocol": table.actions("protocol")[0]}, with_mapping(table, "none"), {"add": {**add, **names}})
    clone.append([2])
    check_read(clone, 3)
    shutil.rmtree(table.path)
    with pytest.raises(StateError, match=r"version 0 is next, and its file file:/.*parquet is no longer there"):
        ps.Engine(config_of()).run(clone.spelling)


def test_partitions_have_the_types_of_their_version_and_may_be_null(tmp_path):
    table = Delta(tmp_path)
    part = pa.array(["a/b =%", None, ""])
    for number in range(3):
        rows = rows_of([number]).append_column("part", part.take(pa.array([number] * FRAMES[number].num_rows)))
        table.library.write_deltalake(table.path, rows, mode="append", partition_by=["step", "part"])
    check_read(table, 3)
    twice = {"step": "3", "part": ""}
    table.commit(table.add([3], partitionValues=twice))  # a writer may store the columns in its files as well
    check_read(table, 4)
    table.commit(table.add([4], "null.parquet", rows=rows_of([4]).drop(["step"]), partitionValues={"step": ""}))
    check_refused(table, r"version 4, null.parquet: .*'step'", 4)


def test_a_position_after_a_checkpoint_of_the_log_continues_without_what_precedes(table, tmp_path):
    table.append([2])
    ps.Engine(config_of()).run(table.spelling, checkpoint=tmp_path / "c")
    table.append([3])
    table.library.DeltaTable(table.path).create_checkpoint()
    Path(table.path, "_delta_log", f"{0:020d}.json").unlink()
    table.append([4])
    engine = ps.Engine.restore(tmp_path / "c")
    engine.run(table.spelling, checkpoint=tmp_path / "c", resume=True)
    assert engine.state_hash() == replayed(FRAMES[:5]).state_hash()


def test_a_damaged_log_is_one_line(table, tmp_path, refused):
    config_of().save(tmp_path / "tables.pbtxt")
    table.append([2])
    table.library.DeltaTable(table.path).create_checkpoint()
    Path(table.path, "_delta_log", f"{0:020d}.json").write_text('{"add": 1}\n{')
    line = refused(3, "replay", tmp_path / "tables.pbtxt", table.spelling)
    assert line.startswith(f"penstock: {table.spelling}: the table cannot be read: ")
