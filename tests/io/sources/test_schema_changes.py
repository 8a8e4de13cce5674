"""Columns of one name, and batches whose schema changes: read where nothing is lost, else refused with a hint."""

import io
from functools import partial

import engines
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from ipc import log, stream, write
from services import client_of, service_of

import penstock as ps
from penstock.cli.main import main
from penstock.io.log import LogWriter

engine_of = partial(engines.engine_of, tables=("user", "item"), rows=8, initializer=ps.Constant(1.0))


def rows(step, ids=(1, 2), **columns):
    of_step = {"table": ["user"] * len(ids), "step": [step] * len(ids), "id": list(ids)}
    gradients = pa.array([[1.0, 2.0]] * len(ids), pa.list_(pa.float32(), 2))
    return pa.record_batch({**of_step, "gradient": gradients, "note": ["n"] * len(ids), **columns})


FIRST, SECOND = rows(0), rows(1, [2, 3])


def with_type(batch, name, kind):
    index = batch.schema.get_field_index(name)
    return batch.set_column(index, name, batch.column(name).cast(kind))


def required(batch):
    return pa.RecordBatch.from_arrays(batch.columns, schema=pa.schema([f.with_nullable(False) for f in batch.schema]))


def element_named(batch, name, nullable):
    child = pa.field(name, pa.float32(), nullable)
    values = pa.FixedSizeListArray.from_arrays(batch["gradient"].flatten(), type=pa.list_(child, 2))
    return batch.set_column(3, "gradient", values)


LOSSLESS = {
    "order": SECOND.select(["note", "gradient", "id", "step", "table"]),
    "not null": required(SECOND),
    "metadata": SECOND.replace_schema_metadata({"pandas": "{}"}),
    "elements": element_named(SECOND, "element", False),
    "dictionary": with_type(SECOND, "table", pa.dictionary(pa.int8(), pa.string())),
    "large strings": with_type(SECOND, "table", pa.large_string()),
    "no notes": SECOND.set_column(4, "note", pa.nulls(2)),
    "all at once": required(with_type(SECOND, "table", pa.large_string())).select([4, 3, 0, 1, 2]),
}
LOSSY = {
    "another column": SECOND.rename_columns(["table", "step", "id", "gradient", "remark"]),
    "one column less": SECOND.drop_columns("note"),
    "one column more": SECOND.append_column("contributor", pa.array([1, 1])),
    "another table": SECOND.replace_schema_metadata({"penstock.table": "item"}),
    "wider integers": with_type(SECOND, "step", pa.int32()),
    "floats": with_type(SECOND, "gradient", pa.list_(pa.float64(), 2)),
    "floats as ids": with_type(SECOND, "id", pa.float64()),
}
EXPECTED = engine_of()
EXPECTED.run([FIRST, SECOND])


@pytest.mark.parametrize("change", LOSSLESS)
def test_batches_that_differ_without_loss_are_one_stream(change, tmp_path):
    batches = [FIRST, LOSSLESS[change], FIRST.slice(0, 0)]
    for source in (batches, iter(batches)):
        engine = engine_of()
        assert engine.run(source).steps == 2
        assert engine.state_hash() == EXPECTED.state_hash()
    # The other way round, as the first batch decides.
    engine = engine_of()
    assert engine.run([LOSSLESS[change].slice(0, 0), FIRST, SECOND]).steps == 2
    assert engine.state_hash() == EXPECTED.state_hash()
    (tmp_path / "log.arrows").write_bytes(log(batches))
    engine = engine_of()
    report = engine.run(tmp_path / "log.arrows")
    assert (report.verified, engine.state_hash()) == (True, EXPECTED.state_hash())


def test_the_types_of_unread_columns_may_change():
    engine = engine_of()
    numbers = SECOND.set_column(4, "note", pa.array([1, 2]))
    assert engine.run([FIRST, numbers]).steps == 2
    assert engine.state_hash() == EXPECTED.state_hash()


@pytest.mark.parametrize("change", LOSSY)
def test_batches_that_would_lose_something_are_refused_with_a_hint(change, tmp_path):
    other = LOSSY[change]
    same_names = {*other.schema.names} == {*FIRST.schema.names}
    hint = r"; convert it first: batch.select\(schema.names\).cast\(schema\)" if same_names else "$"
    engine = engine_of()
    with pytest.raises(ps.InputError, match=f"batch 1: the schema changed: expected table: .*; got .*{hint}"):
        engine.run([FIRST, other])
    assert engine.state_hash() == engine_of().state_hash()  # the frame was not at its end
    with LogWriter(tmp_path / "log.arrows", FIRST.schema) as writer:
        writer.write(FIRST)
        with pytest.raises(ps.UsageError, match=f"batch 1 of the log has another schema.*{hint}"):
            writer.write(other)
    assert not list(tmp_path.iterdir())


def test_the_values_of_a_feature_may_change_their_order():
    table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(1.0), combiner="sum", name="t")
    engine = ps.Engine(ps.EmbeddingConfig.from_features({"f": ps.FeatureConfig(table, name="f")}, batch_size=1))
    values = {"ids": pa.array([[1]]), "gradient": pa.array([[1.0, 2.0]])}
    structs = [
        pa.StructArray.from_arrays([values[name] for name in names], names) for names in (values, [*values][::-1])
    ]
    assert engine.run([pa.record_batch({"f": struct}) for struct in structs]).steps == 2
    assert engine.lookup("t", [1]).tolist() == [[-1.0, -3.0]]


def test_a_log_takes_record_batches_only(tmp_path):
    writer = LogWriter(tmp_path / "log.arrows", FIRST.schema)
    with pytest.raises(ps.UsageError, match=r"expected a pyarrow.RecordBatch, got Table"):
        writer.write(pa.table(FIRST))


def test_a_producer_converts_its_frames_to_the_columns_of_the_first():
    with service_of(engine_of()) as service, client_of(service) as client:
        client.put([FIRST, LOSSLESS["all at once"]], "worker")
        assert service.engine.state_hash() == EXPECTED.state_hash()
        with pytest.raises(ps.InputError, match=r"the schema changed: .*; or take another producer"):
            client.put([rows(2), LOSSY["wider integers"]], "other")


# ---- columns of one name

DOUBLE = pa.Table.from_batches(
    [batch.append_column("x", pa.array([1, 2])).append_column("x", pa.array([3, 4])) for batch in (FIRST, SECOND)]
)


def parquet(batches):
    sink = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_batches(batches), sink)
    return sink.getvalue()


CONTAINERS = {"stream": stream, "file": partial(stream, make=pa.ipc.new_file), "parquet": parquet, "log": log}


@pytest.mark.parametrize("container", [None, *CONTAINERS])
def test_unread_columns_may_have_one_name(container, tmp_path):
    if container:
        (tmp_path / "log").write_bytes(CONTAINERS[container](DOUBLE.to_batches()))
    for source in [tmp_path / "log"] if container else (DOUBLE, DOUBLE.to_batches()):
        engine = engine_of()
        assert engine.run(source).rows == 4
        assert engine.state_hash() == EXPECTED.state_hash()


def test_files_with_columns_of_one_name_are_inspected_and_put(tmp_path, capsys):
    assert main(["inspect", write(tmp_path / "log.arrows", DOUBLE.to_batches())]) == 0
    assert capsys.readouterr().out.count("x: int64") == 2
    with service_of(engine_of()) as service, client_of(service) as client:
        client.put(DOUBLE, "worker")
        assert service.engine.state_hash() == EXPECTED.state_hash()
        with pytest.raises(ps.InputError, match="column 'step': 2 columns have this name; keep one"):
            client.put(DOUBLE.rename_columns([*DOUBLE.schema.names[:5], "step", "x"]), "other")


def test_a_column_that_is_read_is_the_only_one_of_its_name():
    for name in ("id", "step"):
        with pytest.raises(ps.InputError, match=f"column '{name}': 2 columns have this name; keep one"):
            engine_of().run(DOUBLE.rename_columns([*DOUBLE.schema.names[:5], name, "x"]))
    with pytest.raises(ps.InputError, match="no column for the role 'step'"):  # no guess: two columns could be meant
        engine_of().run(DOUBLE.drop_columns("step"))
    table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(1.0), combiner="sum", name="t")
    engine = ps.Engine(ps.EmbeddingConfig.from_features({"f": ps.FeatureConfig(table, name="f")}, batch_size=1))
    ids, gradients = pa.array([[1]]), pa.array([[1.0, 2.0]])
    struct = pa.StructArray.from_arrays([ids, ids, gradients], names=["ids", "ids", "gradient"])
    with pytest.raises(ps.InputError, match="column 'f': 2 values of the struct have the name 'ids'; keep one"):
        engine.run(pa.table({"step": [0], "f": struct}))
