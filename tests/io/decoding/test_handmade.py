"""Arrow messages made by hand (fuzz/handmade.py), the decisive ones: the right rows, or an error in one line."""

import io
import tracemalloc

import pytest
from fuzz import flat, handmade, heads, truth
from streams import frames_of

from penstock.base.errors import InputError

READ = [layout for layout in truth.LAYOUTS if layout not in ("list-views", "run-ends")]
TABLES = {"user": (50, truth.DIM), "item": (20, truth.DIM)}


def ids_of(content):
    return frames_of(io.BytesIO(content), sizes=TABLES, contribution_rows="batch")


def refused(content):
    with pytest.raises(InputError) as caught:
        ids_of(content)
    output = str(caught.value)
    assert "\n" not in output
    assert len(output) < 5000
    return output


@pytest.mark.parametrize("layout", READ)
def test_well_formed_messages_are_read(layout):
    first = sorted(truth.IDS.tolist())
    assert [sorted(frame) for frame in ids_of(truth.stream(layout))] == [first]
    assert [sorted(frame) for frame in ids_of(truth.file(layout))] == [first, first]
    assert [sorted(frame) for frame in ids_of(truth.file(layout, bare_schema=True))] == [first, first]


@pytest.mark.parametrize("name", ["dictionaries-640-mib", "deltas-640-mib"])
def test_dictionaries_that_are_small_each_and_large_together_are_refused(name):
    _, content = dict(handmade.dictionaries())[name]
    assert len(content) < 1 << 20
    assert "unpack to" in refused(content)


@pytest.mark.parametrize("layout", ["plain", "bare"])
@pytest.mark.parametrize("lie", ["batch-twice", "10000-times"])
def test_a_footer_that_names_bytes_twice(layout, lie):
    _, content = dict(heads.footers())[f"{layout}-footer-{lie}"]
    assert "the footer names bytes twice" in refused(content)


@pytest.mark.parametrize("layout", ["plain", "dictionary", "bare"])
def test_a_footer_that_leaves_a_batch_out(layout):
    made = dict(heads.footers())
    assert "bytes between two batches out" in refused(made[f"{layout}-footer-first-omitted"][1])
    assert "bytes that belong to no batch" in refused(made[f"{layout}-footer-batch-omitted"][1])
    assert "bytes that belong to no batch" in refused(made[f"{layout}-footer-no-batches"][1])


def test_a_name_of_megabytes_is_abbreviated_in_the_error_and_needs_no_multiple_of_its_memory():
    size = 1 << 22
    many = flat.dictionary(7, truth.names("a" * size, "item"))
    start, rest = flat.message(flat.SCHEMA, truth.shape("dictionary")), truth.rows("dictionary")
    content = start + many + flat.batch(rest) + flat.END
    tracemalloc.start()
    try:
        assert "more characters" in refused(content)
        assert tracemalloc.get_traced_memory()[1] < 8 * size
    finally:
        tracemalloc.stop()


def test_a_schema_of_a_trillion_columns_in_few_bytes_is_refused():
    _, content = dict(heads.schemas())["2^40-columns"]
    assert len(content) < 20_000
    refused(content)
