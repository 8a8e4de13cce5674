"""What ``put`` takes for frames: record batches, tables, whatever has ``__arrow_c_stream__``."""

import numpy as np
import pyarrow as pa
import pytest
from services import DIM, VOCABULARY, client_of, config_of, frame, replayed, service_of

import penstock as ps

FRAMES = [frame(n, step=n) for n in range(4)]
TABLES = [pa.Table.from_batches([f.slice(0, 7), f.slice(7)]) for f in FRAMES]
WHOLE = pa.Table.from_batches(FRAMES)
ENCODED = WHOLE.set_column(
    WHOLE.schema.names.index("step"), "step", pa.compute.run_end_encode(WHOLE["step"].combine_chunks())
)


class Other:
    """A table of another library: iterating it gives its columns, as polars does it."""

    def __init__(self, table):
        self._table = table

    def __iter__(self):
        return iter(self._table.columns)

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "frames",
    [
        TABLES,
        [Other(table) for table in TABLES],
        [[table.slice(0, 3), table.slice(3)] for table in TABLES],
        [FRAMES[0], TABLES[1], Other(TABLES[2]), [TABLES[3]]],
        WHOLE,
        Other(WHOLE),
        WHOLE.to_reader(),
        WHOLE.combine_chunks(),
        pa.concat_batches(FRAMES),
    ],
    ids=["tables", "others", "pieces", "mixed", "table", "other", "reader", "one chunk", "batch"],
)
def test_tables_are_frames_and_a_table_of_several_steps_is_cut_into_them(frames):
    with service_of() as service, client_of(service) as client:
        assert client.put(frames, "w0").position == 4
        assert service.engine.state_hash() == replayed(FRAMES).state_hash()


def with_contributor(table, names):
    return table.append_column("contributor", names)


@pytest.mark.parametrize("kind", ["text", "dictionary", "view", "dictionary of views", "numbers"])
def test_a_table_is_cut_where_its_contributor_changes(kind):
    names = [0] * 20 + [1] * 20 + [None] * 20 + [1] * 20
    types = {"dictionary": pa.dictionary(pa.int8(), pa.string()), "view": pa.string_view(), "text": pa.string()}
    text = [None if name is None else f"worker {name}" for name in names]
    if kind == "dictionary of views":  # what polars makes of a categorical column
        views = pa.array(["worker 0", "worker 1"], pa.string_view())
        column = pa.DictionaryArray.from_arrays(pa.array(names, pa.uint32()), views)
    else:
        column = pa.array(names) if kind == "numbers" else pa.array(text, types[kind])
    table = with_contributor(WHOLE.drop_columns("step"), column)
    halves = pa.concat_tables([table.slice(0, 30), table.slice(30)])  # a frame over two chunks
    with service_of() as service, client_of(service) as client:
        assert client.put(halves, "w0").position == 4
        assert service.engine.state_hash() == replayed(FRAMES).state_hash()


def test_a_table_without_steps_is_one_frame():
    with service_of() as service, client_of(service) as client:
        assert client.put(WHOLE.drop_columns("step"), "w0").position == 1
        assert client.put(WHOLE.slice(0, 0), "w0", first=2).applied == 0


def test_batches_of_a_table_may_have_dictionaries_of_their_own():
    tables = ("user", "item")
    batches = [frame(n, table=tables[n % 2]) for n in range(4)]
    coded = [b.set_column(2, "table", b["table"].dictionary_encode()) for b in batches]
    with service_of(ps.Engine(config_of(tables))) as service, client_of(service) as client:
        assert client.put([pa.Table.from_batches(coded)], "w0").position == 1
        assert client.put([coded[0], pa.Table.from_batches(coded[1:])], "w1").position == 2
        wanted = replayed([pa.concat_batches(batches), batches[0], pa.concat_batches(batches[1:])], config_of(tables))
        assert service.engine.state_hash() == wanted.state_hash()


def test_a_program_may_write_to_the_arrays_of_a_frame_that_it_has_sent():
    """The service reads no early frame before the other worker's, so that those wait in the producer."""
    ids, gradients = np.arange(20_000) % VOCABULARY, np.zeros((20_000, DIM), np.float32)
    served, expected = (ps.Engine(config_of(), workers=2) for _ in range(2))
    with service_of(served) as service, client_of(service) as first, client_of(service) as two:
        workers = [client.producer(f"rank-{rank}") for rank, client in enumerate((first, two))]
        for rank, worker in enumerate(workers):
            for step in range(6):
                gradients[:] = rank + step
                vectors = pa.FixedSizeListArray.from_arrays(pa.array(gradients.reshape(-1)), DIM)
                worker.send(pa.record_batch({"step": np.full(len(ids), step), "id": ids, "gradient": vectors}))
                gradients[:] = np.nan
        for worker in workers:
            worker.close()
    for step in range(6):
        for rank in range(2):
            rows = np.full((len(ids), DIM), rank + step, np.float32)
            assert expected.apply({"user": (ids, rows)}, local_step=step, contributor=f"rank-{rank}")
    assert served.state_hash() == expected.state_hash()


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ([TABLES[0].slice(0, 0)], "expected a frame: a record batch or table with rows, or a list of them"),
        ([[]], "expected a frame: a record batch or table with rows, or a list of them"),
        ([7], "expected a frame: a record batch or table with rows, or a list of them, got int"),
        ([[FRAMES[0], "x"]], "expected a frame: a record batch or table with rows, or a list of them, got str"),
        ([WHOLE], "column 'step': expected one frame: all its rows have one value"),
        ([ENCODED], "column 'step': cast it to integers or strings first"),
        (ENCODED, "column 'step': cast it to integers or strings first"),
        ([pa.chunked_array([[1, 2]])], "expected a frame: a record batch or table with rows"),
    ],
)
def test_frames_of_other_types_are_refused(wrong, problem):
    with service_of() as service, client_of(service) as client:
        with pytest.raises(ps.InputError) as error:
            client.put(wrong, "w0")
        assert problem in str(error.value)
        assert client.position("w0") == 0


class Lazy:
    def collect(self):
        return WHOLE


@pytest.mark.parametrize(("wrong", "got"), [(7, "int"), (Lazy(), "Lazy; collect() it first")])
def test_put_arguments_of_other_types_are_refused(wrong, got):
    with service_of() as service, client_of(service) as client:
        with pytest.raises(ps.UsageError) as error:
            client.put(wrong, "w0")
        assert str(error.value) == f"frames: expected an iterable of record batches or tables, or one table, got {got}"
