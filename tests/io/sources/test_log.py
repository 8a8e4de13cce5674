"""penstock's own log: any reader reads it, ours checks it; no flip and no cut goes unseen."""

import io
import re
import zlib

import pyarrow as pa
import pyarrow.ipc
import pytest
from ipc import log, messages, stream, write
from logs import BATCHES, LOG, SIZES, SMALL, WANTED, read

from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.sources.checksums import CLOSED_KEY, LOG_KEY
from penstock.io.sources.opening import open_source

NONE = "it carries no checksums"

# ---- what is written


def test_any_reader_of_arrow_reads_a_log():
    opened = pa.ipc.open_stream(LOG)
    assert opened.schema.equals(BATCHES[0].schema)
    assert opened.schema.metadata[LOG_KEY] == b"1"
    table = opened.read_all()
    assert table.to_pylist() == [row for batch in BATCHES for row in batch.to_pylist()]
    assert table.validate(full=True) is None


def test_every_batch_has_a_number_and_a_checksum_and_the_last_one_closes():
    opened = pa.ipc.open_stream(LOG)
    actual = [opened.read_next_batch_with_custom_metadata() for _ in range(4)]
    assert [dict(m)[b"penstock.batch"] for _, m in actual] == [b"0", b"1", b"2", b"3"]
    assert [dict(m).get(CLOSED_KEY) for _, m in actual] == [None, None, None, b"3"]
    assert actual[-1][0].num_rows == 0
    assert all(dict(m)[b"penstock.crc"].startswith(b"crc32:") for _, m in actual)


def test_the_checksum_is_the_crc32_of_all_bytes_so_far_with_zeros_for_checksums():
    head, pieces, _ = messages(LOG)
    stated = [re.search(rb"crc32:([0-9a-f]{8})\0", piece)[1] for piece in pieces]
    so_far = head
    for piece, digits in zip(pieces, stated, strict=True):
        so_far += re.sub(rb"crc32:[0-9a-f]{8}\0", b"crc32:00000000\0", piece)
        assert f"{zlib.crc32(so_far):08x}".encode() == digits


def test_metadata_of_the_schema_stays():
    schema = BATCHES[0].schema.with_metadata({"penstock.table": "user"})
    assert pa.ipc.open_stream(log(BATCHES, schema)).schema.metadata[b"penstock.table"] == b"user"


# ---- what is read


def test_frames_are_those_of_a_plain_stream_and_verified(tmp_path):
    (tmp_path / "log").write_bytes(LOG)
    for source in (tmp_path / "log", io.BytesIO(LOG)):
        assert read(source) == (WANTED, True)
    assert read(io.BytesIO(stream(BATCHES))) == (WANTED, False)


def test_the_closing_record_is_no_frame_and_no_batch():
    batches = [b.drop_columns(["step", "contributor"]) for b in BATCHES]
    assert len(read(io.BytesIO(log(batches)))[0]) == 3
    (part,) = open_source(io.BytesIO(LOG)).parts()
    assert "log with checksums" in part.container


def test_empty_logs_and_empty_batches():
    empty = BATCHES[0].slice(0, 0)
    assert read(io.BytesIO(log([], empty.schema))) == ([], True)
    assert read(io.BytesIO(log([empty, *BATCHES, empty]))) == (WANTED, True)


def test_verified_means_every_source_to_its_end(tmp_path):
    (tmp_path / "a").write_bytes(LOG)
    (tmp_path / "b").write_bytes(stream(BATCHES))
    a, b = tmp_path / "a", tmp_path / "b"
    assert read([a, a])[1]
    assert not read([a, b])[1]
    assert not read(tmp_path)[1]
    assert read([a, a], merge="step")[1]
    reader = FrameReader(a, ReadOptions(SIZES))
    frames = iter(reader)
    next(frames)
    frames.close()
    assert not reader.verified
    assert not FrameReader(a, ReadOptions(SIZES)).verified


def test_other_containers_made_from_a_log_are_read_as_they_are(tmp_path):
    table = pa.ipc.open_stream(LOG).read_all().drop_columns(["note"]).unify_dictionaries()
    with pa.ipc.new_file(tmp_path / "file", table.schema) as writer:
        writer.write_table(table)
    assert read(tmp_path / "file") == (WANTED, False)
    assert read(pa.ipc.open_stream(LOG)) == (WANTED, False)


# ---- the engine and the command line


def test_a_replay_of_a_log_is_verified_and_has_the_hash_of_the_plain_stream(tmp_path, call):
    log, config, plain = (tmp_path / name for name in ("log.arrows", "log.pbtxt", "plain.arrows"))
    rows = ["--rows", "500", "--rows-per-step", "100", "--tables", "2", "--vocabulary", "50", "--dim", "3"]
    call(0, "synth", log, *rows)
    opened = pa.ipc.open_stream(log)
    write(plain, opened.read_all().to_batches(), schema=opened.schema.remove_metadata())
    actual = {}
    for source in (log, plain):
        text, actual[source] = call(0, "replay", config, source)
        assert f"input     {'verified: every checksum fits' if source == log else f'unverified: {NONE}'}\n" in text
    assert (actual[log]["unverified"], actual[plain]["unverified"]) == (None, NONE)
    assert (actual[log]["verified"], actual[plain]["verified"]) == (True, False)
    assert actual[log]["state_hash"] == actual[plain]["state_hash"]
    assert actual[log]["frames"] == actual[plain]["frames"] == 5
    flags = ["--merge", "round", "--num-required", "2"]
    for sources, more, why in (
        ([log], ["--limit", "2"], "it was not read to its end"),
        ([log], ["--limit", "0"], "it was not read to its end"),
        ([plain], ["--limit", "2"], NONE),
        ([log, plain], [], "not all of it carries checksums"),
    ):
        text, report = call(0, "replay", config, *sources, *flags, *more)
        assert (report["verified"], report["unverified"]) == (False, why)
        assert f"input     unverified: {why}\n" in text


@pytest.mark.parametrize("missing", ["end marker", "closing record"])
def test_a_log_without_its_end_was_not_read_to_its_end(tmp_path, missing):
    schema, pieces, _ = messages(SMALL)
    (tmp_path / "log").write_bytes(schema + b"".join(pieces if missing == "end marker" else pieces[:1]))
    reader = FrameReader(tmp_path / "log", ReadOptions(SIZES, allow_missing_end=True))
    assert list(reader)
    assert (reader.verified, reader.unverified) == (False, "it was not read to its end")


def test_inspect_says_that_it_is_a_log_with_checksums(tmp_path, call):
    (tmp_path / "log").write_bytes(LOG)
    text, result = call(0, "inspect", tmp_path / "log")
    (part,) = result["parts"]
    assert (part["batches"], part["frames"], part["verified"]) == (3, 7, True)
    assert "log with checksums" in text
