"""Tables of other libraries as sources, by the Arrow capsule protocol: the result is that of the Arrow table.

Each test runs if its library is installed (``pip install 'penstock[neighbours]'``), and asserts which information the
library loses; docs/sources.md lists the same for users.
"""

import contextlib

import numpy as np
import pyarrow as pa
import pytest
from neighbours import DIM, ROWS, config, state_of
from services import client_of, service_of

import penstock as ps


@pytest.fixture
def tensors(gradients):
    """The table of ``gradients``, with its gradients as fixed-shape tensors."""
    storage = gradients["gradient"].combine_chunks()
    tensor = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), [DIM]), storage)
    return gradients.set_column(3, "gradient", tensor)


def types_of(source):
    return {f.name: f.type for f in pa.RecordBatchReader.from_stream(source).schema}


def metadata_of(source):
    return pa.RecordBatchReader.from_stream(source).schema.metadata or {}


def with_table_key(gradients):
    """Return the rows of the table 'user', with the name of the table only in the schema's metadata."""
    rows = gradients.filter(pa.compute.equal(gradients["table"].cast(pa.string()), "user")).drop_columns("table")
    return rows.replace_schema_metadata({"penstock.table": "user"})


# ---- pyarrow


def test_columns_of_nulls_without_rows_are_no_frames_and_with_rows_bad_input(gradients):
    nothing = pa.table({name: pa.nulls(0) for name in gradients.column_names})
    assert ps.Engine(config()).run([nothing, gradients, nothing]).rows == ROWS
    with pytest.raises(ps.InputError, match="column 'id': expected any integer type, got null"):
        ps.Engine(config()).run(pa.table({name: pa.nulls(1) for name in nothing.column_names}))
    unused = gradients.append_column("note", pa.nulls(ROWS))
    assert state_of(unused) == state_of(gradients)


# ---- polars


def test_polars_gives_the_same_bits(gradients, tensors, expected):
    pl = pytest.importorskip("polars")
    assert state_of(pl.from_arrow(gradients)) == expected
    assert state_of(pl.from_arrow(tensors)) == expected


def test_polars_turns_strings_into_string_views_with_the_same_bits(gradients, expected):
    pl = pytest.importorskip("polars")
    data_frame = pl.from_arrow(gradients)
    assert types_of(data_frame)["table"].value_type == pa.string_view()
    frame_of_strings = data_frame.with_columns(pl.col("table").cast(pl.String))
    assert types_of(frame_of_strings)["table"] == pa.string_view()
    assert state_of(frame_of_strings) == expected


def test_polars_lists_of_doubles_give_the_same_bits(gradients, expected):
    pl = pytest.importorskip("polars")
    data_frame = pl.from_arrow(gradients).with_columns(pl.col("gradient").cast(pl.List(pl.Float64)))
    assert types_of(data_frame)["gradient"] == pa.large_list(pa.float64())
    assert state_of(data_frame) == expected  # float32 → float64 → float32 keeps every value


def test_polars_loses_the_schemas_metadata_and_the_table_option_replaces_it(gradients):
    pl = pytest.importorskip("polars")
    data_frame = pl.from_arrow(with_table_key(gradients))
    assert b"penstock.table" not in metadata_of(data_frame)
    with pytest.raises(ps.InputError, match="table"):
        ps.Engine(config()).run(data_frame)
    expected_engine = ps.Engine(config())
    expected_engine.run(with_table_key(gradients))
    engine = ps.Engine(config())
    engine.run(data_frame, table="user")
    assert engine.state_hash() == expected_engine.state_hash()


def test_polars_data_without_steps_requires_contribution_rows(gradients):
    pl = pytest.importorskip("polars")
    data_frame = pl.from_arrow(gradients.drop_columns("step"))
    with pytest.raises(ps.PenstockError, match="contribution"):
        ps.Engine(config()).run(data_frame)
    assert ps.Engine(config()).run(data_frame, contribution_rows=50).frames == 4


def test_a_lazy_frame_gives_the_same_bits(gradients, expected, tmp_path):
    pl = pytest.importorskip("polars")
    data_frame = pl.from_arrow(gradients)
    assert state_of(data_frame.lazy()) == expected
    data_frame.with_columns(note=pl.lit("x")).write_parquet(tmp_path / "log.parquet")
    query = pl.scan_parquet(tmp_path / "log.parquet")
    assert state_of(query) == expected
    assert ps.Engine(config()).run(query.filter(pl.col("step") >= 2)).frames == 3
    assert ps.Engine(config()).run(query.filter(pl.col("step") > 9)).frames == 0
    assert ps.Engine(config()).run(query, limit=1).frames == 1


def test_the_client_puts_polars_data_frames(gradients, expected):
    pl = pytest.importorskip("polars")
    data_frame = pl.from_arrow(gradients)
    for frames in (data_frame, data_frame.partition_by("step", maintain_order=True)):
        with service_of(ps.Engine(config())) as service, client_of(service) as client:
            assert client.put(frames, "w0").applied == 5
            assert service.engine.state_hash() == expected


def test_a_lazy_frame_that_fails_is_an_input_error_with_the_cause(gradients, tmp_path):
    pl = pytest.importorskip("polars")
    with pytest.raises(ps.InputError, match=r"^<polars LazyFrame>: the query failed: .*nowhere.parquet"):
        ps.Engine(config()).run(pl.scan_parquet(tmp_path / "nowhere.parquet"))
    with pytest.raises(ps.InputError, match=r'the query failed: unable to find column "b"; valid columns: \[.*\]$'):
        ps.Engine(config()).run(pl.from_arrow(gradients).lazy().with_columns(id=pl.col("b")))
    failing_query = pl.from_arrow(gradients).lazy().with_columns(id=pl.lit("x").cast(pl.Int64))
    with pytest.raises(ps.InputError, match="conversion from `str` to `i64` failed"):
        ps.Engine(config()).run(failing_query)


# ---- duckdb


@pytest.fixture
def connection():
    duckdb = pytest.importorskip("duckdb")
    with contextlib.closing(duckdb.connect()) as connection:
        yield connection


def test_duckdb_gives_the_same_bits(connection, gradients, expected):
    connection.register("log", gradients)
    assert state_of(connection.sql("select * from log")) == expected


def test_duckdb_unwraps_tensors_and_dictionaries(connection, tensors, expected):
    connection.register("log", tensors)
    types = types_of(connection.sql("select * from log"))
    assert types["gradient"].list_size == DIM
    assert not isinstance(types["gradient"], pa.BaseExtensionType)
    assert types["table"] == pa.string()
    assert state_of(connection.sql("select * from log")) == expected


def test_duckdb_orders_and_filters_before_the_engine(connection, gradients):
    connection.register("log", gradients)
    subset = connection.sql("select * from log where step >= 2 order by step, id")
    assert ps.Engine(config()).run(subset).frames == 3


def test_a_query_that_duckdb_refuses_is_bad_input(connection):
    with pytest.raises(ps.InputError, match=r"<duckdb DuckDBPyRelation>: no stream of record batches: .*no such day"):
        ps.Engine(config()).run(connection.sql("select error('no such day') as id"))


# ---- pandas


def test_a_frame_of_pandas_of_which_no_row_is_left_is_no_frame(gradients):
    pytest.importorskip("pandas")
    data_frame = gradients.to_pandas()
    report = ps.Engine(config()).run([data_frame[data_frame.step < 0], data_frame])
    assert report.rows == ROWS


@pytest.mark.parametrize("arrow_types", [False, True])
def test_pandas_gives_the_same_bits(gradients, expected, arrow_types):
    pd = pytest.importorskip("pandas")
    data_frame = gradients.to_pandas(types_mapper=pd.ArrowDtype) if arrow_types else gradients.to_pandas()
    is_fixed_size = pa.types.is_fixed_size_list(types_of(data_frame)["gradient"])
    assert is_fixed_size == arrow_types  # NumPy's object columns do not keep the length of lists
    assert state_of(data_frame) == expected


# ---- nanoarrow


def test_nanoarrow_gives_the_same_bits_and_loses_nothing(gradients, tensors, expected):
    na = pytest.importorskip("nanoarrow")
    assert state_of(na.ArrayStream(gradients)) == expected
    assert state_of(na.ArrayStream(tensors)) == expected
    assert types_of(na.ArrayStream(tensors))["gradient"] == tensors.schema.field("gradient").type
    assert metadata_of(na.ArrayStream(with_table_key(gradients))) == {b"penstock.table": b"user"}


# ---- ADBC


def test_gradients_stored_as_columns_of_numbers_in_adbc_give_the_same_bits(gradients, expected):
    """SQLite has no lists: the table has a column of doubles per number of a gradient, and ``batches`` joins them."""
    dbapi = pytest.importorskip("adbc_driver_sqlite.dbapi")
    values = gradients["gradient"].combine_chunks().flatten().to_numpy().reshape(ROWS, DIM)
    flat = gradients.drop_columns("gradient").set_column(1, "table", gradients["table"].cast(pa.string()))
    for number in range(DIM):
        flat = flat.append_column(f"g{number}", pa.array(values[:, number].astype(np.float64)))

    def batches(cursor):
        for batch in cursor.fetch_record_batch():
            numbers = np.stack([batch[f"g{first}"].to_numpy() for first in range(DIM)], axis=1).astype(np.float32)
            gradient = pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), DIM)
            columns = {name: batch[name] for name in ("step", "table", "id")}
            yield pa.RecordBatch.from_pydict(columns | {"gradient": gradient})

    with dbapi.connect() as connection, connection.cursor() as cursor:
        cursor.adbc_ingest("log", flat)
        cursor.execute("select * from log")
        assert state_of(batches(cursor)) == expected


# ---- OpenTelemetry


def test_the_opentelemetry_span_of_a_run_is_the_parent_of_those_of_its_steps(gradients):
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    memory_exporter = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporters = pytest.importorskip("opentelemetry.sdk.trace.export")
    spans, provider = memory_exporter.InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(exporters.SimpleSpanProcessor(spans))
    engine = ps.Engine(config())
    engine.watch.tracer = provider.get_tracer("penstock")
    engine.run(gradients)
    *steps, run = spans.get_finished_spans()
    assert [span.name for span in steps] == ["penstock.step"] * 5
    assert run.name == "penstock.run"
    assert {span.parent.span_id for span in steps} == {run.context.span_id}


# ---- ids that are strings


@pytest.mark.parametrize(
    ("library", "create"),
    [
        ("pandas", lambda pd, texts: pd.Series(texts, index=[5, 3])),
        ("pandas", lambda pd, texts: pd.Series(texts, dtype="category")),
        ("pandas", lambda pd, texts: pd.Series([text.encode() for text in texts])),
        ("pandas", lambda pd, texts: pd.concat([pd.Series([text]) for text in texts])),
        ("polars", lambda pl, texts: pl.Series(texts)),
        ("polars", lambda pl, texts: pl.Series(texts, dtype=pl.Categorical)),
    ],
)
def test_a_text_has_the_same_key_in_arrays_of_any_library(library, create):
    texts = ["a", "ccc"]
    assert ps.hash_ids(create(pytest.importorskip(library), texts)).tolist() == ps.hash_ids(texts).tolist()
