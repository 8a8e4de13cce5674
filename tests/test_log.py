"""penstock's own log: any reader reads it, ours checks it; no flip and no cut goes unseen."""

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

from penstock.cli.main import main
from penstock.errors import InputError, TruncatedInputError, UsageError
from penstock.io.checksums import CLOSED_KEY, LOG_KEY
from penstock.io.log import LogWriter
from penstock.io.reader import FrameReader, ReadOptions
from penstock.io.sources import open_source

SIZES = {"user": (50, 2), "item": (50, 2)}
PAIRS = pa.list_(pa.float32(), 2)
NAMES = pa.dictionary(pa.int8(), pa.utf8())


def batch_of(step, names=("user", "item"), rows=3):
    """A dictionary of its own, nulls, offsets, validity and a nested dictionary."""
    codes = pa.array([n % len(names) for n in range(rows)], pa.int8())
    columns = {
        "table": pa.DictionaryArray.from_arrays(codes, pa.array(names)),
        "id": pa.array([10 * step + n for n in range(rows)]),
        "gradient": pa.array([[step + 0.5, n + 0.25] for n in range(rows)], PAIRS),
        "step": pa.array([step] * rows),
        "contributor": pa.array([None if n == 1 else f"w{n}" for n in range(rows)], pa.utf8()),
        "note": pa.array([["a", "b"]] * rows, pa.list_(NAMES)),
    }
    return pa.RecordBatch.from_pydict(columns)


BATCHES = [batch_of(0), batch_of(1, ("item", "user")), batch_of(2, rows=1)]


def log_of(batches=BATCHES, schema=None):
    sink = io.BytesIO()
    with LogWriter(sink, schema or batches[0].schema) as log:
        for batch in batches:
            log.write(batch)
    return sink.getvalue()


def plain_of(batches=BATCHES):
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def read(source, **options):
    """The frames as plain values, and whether they were verified."""
    reader = FrameReader(source, ReadOptions(SIZES, **options))
    frames = [
        (
            f.local_step,
            f.contributor,
            {t: [(b.ids.tolist(), b.grads.tolist(), b.which) for b in r] for t, r in f.rows.items()},
        )
        for f in reader
    ]
    return frames, reader.verified


def messages(content):
    """Every batch with the dictionaries before it, and what stands before and after them."""
    reader = pa.BufferReader(content)
    stream = pa.ipc.open_stream(reader)
    ends = [reader.tell()]
    while True:
        try:
            stream.read_next_batch()
        except StopIteration:
            break
        ends.append(reader.tell())
    pieces = [content[a:b] for a, b in itertools.pairwise(ends)]
    return content[: ends[0]], pieces, content[ends[-1] :]


LOG, WANTED = log_of(), read(io.BytesIO(plain_of()))[0]
# For what is done to every bit or byte.
FEW = [b.drop_columns(["note"]) for b in BATCHES[:2]]
SMALL, SMALL_WANTED = log_of(FEW), read(io.BytesIO(plain_of(FEW)))[0]


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
    found = [opened.read_next_batch_with_custom_metadata() for _ in range(4)]
    assert [dict(m)[b"penstock.batch"] for _, m in found] == [b"0", b"1", b"2", b"3"]
    assert [dict(m).get(CLOSED_KEY) for _, m in found] == [None, None, None, b"3"]
    assert found[-1][0].num_rows == 0
    assert all(dict(m)[b"penstock.crc"].startswith(b"crc32:") for _, m in found)


def test_the_checksum_is_the_crc32_of_all_bytes_so_far_with_zeros_for_checksums():
    head, pieces, _ = messages(LOG)
    stated = [re.search(rb"crc32:([0-9a-f]{8})\0", piece)[1] for piece in pieces]
    so_far = head
    for piece, digits in zip(pieces, stated, strict=True):
        so_far += re.sub(rb"crc32:[0-9a-f]{8}\0", b"crc32:00000000\0", piece)
        assert f"{zlib.crc32(so_far):08x}".encode() == digits


def test_the_same_batches_give_the_same_bytes():
    assert log_of() == LOG


def test_metadata_of_the_schema_stays():
    schema = BATCHES[0].schema.with_metadata({"penstock.table": "user"})
    assert pa.ipc.open_stream(log_of(schema=schema)).schema.metadata[b"penstock.table"] == b"user"


# ---- what is read


def test_frames_are_those_of_a_plain_stream_and_verified(tmp_path):
    (tmp_path / "log").write_bytes(LOG)
    for source in (tmp_path / "log", io.BytesIO(LOG)):
        assert read(source) == (WANTED, True)
    assert read(io.BytesIO(plain_of())) == (WANTED, False)


def test_the_closing_record_is_no_frame_and_no_batch():
    batches = [b.drop_columns(["step", "contributor"]) for b in BATCHES]
    assert len(read(io.BytesIO(log_of(batches)))[0]) == 3
    (part,) = open_source(io.BytesIO(LOG)).parts()
    assert "log with checksums" in part.container


def test_empty_logs_and_empty_batches():
    empty = BATCHES[0].slice(0, 0)
    assert read(io.BytesIO(log_of([], empty.schema))) == ([], True)
    assert read(io.BytesIO(log_of([empty, *BATCHES, empty]))) == (WANTED, True)


def test_verified_means_every_source_to_its_end(tmp_path):
    (tmp_path / "a").write_bytes(LOG)
    (tmp_path / "b").write_bytes(plain_of())
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


# ---- damage

FLIPS = """
import io, pathlib, sys
sys.path.insert(0, sys.argv[2])
from penstock.errors import PenstockError
from test_log import SMALL_WANTED, read
path, part = pathlib.Path(sys.argv[1]), int(sys.argv[3])
content = path.read_bytes()
same = refused = 0
for bit in range(part, 8 * len(content), 2):
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    print(bit, file=sys.stderr, flush=True)  # the last line tells which flip it was
    source = io.BytesIO(damaged)
    if bit // 16 % 8 == 0:
        source = path.with_name(f"damaged{part}")
        source.write_bytes(damaged)
    try:
        frames, verified = read(source)
    except PenstockError as error:
        assert "\\n" not in str(error), error
        refused += 1
        continue
    assert frames == SMALL_WANTED, bit
    same += 1
print(same, refused)
"""


def test_every_flip_of_a_single_bit_is_an_error_or_changes_nothing(tmp_path):
    (tmp_path / "log").write_bytes(SMALL)
    folder = os.path.dirname(os.path.abspath(__file__))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", FLIPS, str(tmp_path / "log"), folder, str(part)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in (0, 1)
    ]
    same = refused = 0
    for process in running:
        out, err = process.communicate()
        assert process.returncode == 0, err[-2000:]
        same, refused = same + int(out.split()[0]), refused + int(out.split()[1])
    assert same + refused == 8 * len(SMALL)
    assert same == 0  # every byte of it is under a checksum, or the end marker's


def test_every_cut_is_an_error(tmp_path):
    for length in range(len(SMALL)):
        with pytest.raises(InputError):
            read(io.BytesIO(SMALL[:length]))
        if length % 8 in (0, 7):
            (tmp_path / "cut").write_bytes(SMALL[:length])
            with pytest.raises(InputError):
                read(tmp_path / "cut")
    head, pieces, end = messages(LOG)
    for kept in range(len(pieces)):
        cut = head + b"".join(pieces[:kept])
        for tail in (b"", end):
            with pytest.raises(TruncatedInputError, match="no closing record"):
                read(io.BytesIO(cut + tail))


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ((1, 0, 2, 3), "expected batch 0 of the log, got 1"),
        ((0, 0, 1, 2, 3), "expected batch 1 of the log, got 0"),
        ((0, 2, 3), "batch 1: expected batch 1 of the log, got 2"),
        ((0, 1, 3), "expected batch 2 of the log, got 3"),
        ((0, 1, 2, 3, 2), "follows the log's closing record"),
        ((0, 1, 2, 3, 3), "follows the log's closing record"),
    ],
)
def test_batches_swapped_repeated_or_missing(order, problem):
    head, pieces, end = messages(log_of([b.drop_columns(["table", "note"]) for b in BATCHES]))
    with pytest.raises(InputError, match=problem):
        read(io.BytesIO(head + b"".join(pieces[n] for n in order) + end), table="user")


def test_a_batch_of_another_log_with_the_same_number():
    head, pieces, end = messages(LOG)
    others = messages(log_of([batch_of(3), batch_of(4), BATCHES[2]]))[1]
    with pytest.raises(InputError, match=r"batch 1: checksum differs: the batch was damaged after it was written"):
        read(io.BytesIO(head + pieces[0] + others[1] + b"".join(pieces[2:]) + end))


def test_no_batch_is_handed_on_before_its_checksum_was_seen_to_fit():
    at = LOG.index(np.float32([1.5, 0.25]).tobytes())  # the first gradient of batch 1
    damaged = bytearray(LOG)
    damaged[at] ^= 1
    for part in open_source(io.BytesIO(damaged), allow_missing_end=True).parts():
        batches = part.batches(part.schema.names)
        assert next(batches).data.num_rows == 3
        with pytest.raises(InputError, match="batch 1: checksum differs"):
            next(batches)
    reader = FrameReader(io.BytesIO(damaged), ReadOptions(SIZES, allow_missing_end=True))
    seen = []
    with pytest.raises(InputError, match="<stream>: batch 1: checksum differs"):
        seen.extend(f.local_step for f in reader)
    assert not reader.verified


def test_a_log_that_another_program_wrote_anew_says_what_to_do():
    opened = pa.ipc.open_stream(LOG)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, opened.schema) as writer:
        writer.write_table(opened.read_all())
    with pytest.raises(InputError, match=r"carries no checksum.*take 'penstock.log' out of the schema's metadata"):
        read(io.BytesIO(sink.getvalue()))


def test_a_log_of_a_later_version_is_refused():
    with pytest.raises(InputError, match="version 2; this penstock reads version 1"):
        read(io.BytesIO(LOG.replace(b"\1\0\0\x001\0", b"\1\0\0\x002\0")))


# ---- writers that end early


def test_what_was_written_before_a_kill_is_a_cut_log(tmp_path):
    code = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from penstock.io.log import LogWriter
from test_log import BATCHES
file = open(sys.argv[1], "wb", buffering=0)
log = LogWriter(file, BATCHES[0].schema)
log.write(BATCHES[0])
log.write(BATCHES[1])
named = LogWriter(sys.argv[1] + ".named", BATCHES[0].schema)
named.write(BATCHES[0])
os.kill(os.getpid(), signal.SIGKILL)
"""
    folder = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "log"), folder])
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "log.named").exists()
    with pytest.raises(TruncatedInputError, match="no closing record after batch 1"):
        read(tmp_path / "log")
    frames, verified = read(tmp_path / "log", allow_missing_end=True)
    assert frames == WANTED[: len(frames)]
    assert frames
    assert not verified


def test_a_path_gets_its_file_only_when_the_log_is_whole(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"before")

    def fails():
        with LogWriter(path, BATCHES[0].schema) as log:
            log.write(BATCHES[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert path.read_bytes() == b"before"
    with LogWriter(path, BATCHES[0].schema) as log:
        for batch in BATCHES:
            log.write(batch)
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == LOG
    assert os.listdir(tmp_path) == ["log"]


def test_another_schema_and_a_closed_log_are_refused(tmp_path):
    log = LogWriter(tmp_path / "log", BATCHES[0].schema)
    with pytest.raises(UsageError, match="batch 0 of the log has another schema"):
        log.write(BATCHES[0].drop_columns(["note"]))
    with pytest.raises(UsageError, match="the log is closed"):
        log.write(BATCHES[0])
    log.close()
    assert os.listdir(tmp_path) == []


class Full(io.RawIOBase):
    """A disk that fills up, and takes less than it is given before."""

    def __init__(self, room):
        self.content, self._room = b"", room

    def writable(self):
        return True

    def write(self, data):
        if len(self.content) >= self._room:
            raise OSError(28, "No space left on device")
        self.content += bytes(data[:100])
        return min(len(data), 100)


def test_a_disk_that_is_full_ends_the_log_and_short_writes_do_not():
    whole = Full(1 << 20)
    with LogWriter(whole, BATCHES[0].schema) as log:
        for batch in BATCHES:
            log.write(batch)
    assert whole.content == LOG
    full = Full(2000)
    log = LogWriter(full, BATCHES[0].schema)
    log.write(BATCHES[0])
    with pytest.raises(OSError, match="No space left"):
        log.write(BATCHES[1])
    log.close()
    with pytest.raises(InputError):
        read(io.BytesIO(full.content))


# ---- the engine and the command line


def test_a_replay_of_a_log_is_verified_and_has_the_hash_of_the_plain_stream(tmp_path, capsys):
    log, config, plain = (tmp_path / name for name in ("log.arrows", "log.pbtxt", "plain.arrows"))
    rows = ["--rows", "500", "--rows-per-step", "100", "--tables", "2", "--vocabulary", "50", "--dim", "3"]
    assert main(["synth", str(log), *rows]) == 0
    stream = pa.ipc.open_stream(log)
    with pa.ipc.new_stream(plain, stream.schema.remove_metadata()) as writer:
        writer.write_table(stream.read_all())
    capsys.readouterr()
    found = {}
    for source in (log, plain):
        assert main(["replay", str(config), str(source), "--json"]) == 0
        out, err = capsys.readouterr()
        found[source] = json.loads(out)
        assert ("input     verified" in err) == (source == log)
        assert ("input     unverified" in err) == (source == plain)
    assert (found[log]["verified"], found[plain]["verified"]) == (True, False)
    assert found[log]["state_hash"] == found[plain]["state_hash"]
    assert found[log]["frames"] == found[plain]["frames"] == 5
    assert main(["replay", str(config), str(log), "--json", "--limit", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] is False


def test_a_damaged_log_is_exit_3_in_one_line(tmp_path, capsys):
    log = tmp_path / "log.arrows"
    assert main(["synth", str(log), "--rows", "300", "--rows-per-step", "100", "--dim", "3"]) == 0
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 4
    log.write_bytes(content)
    capsys.readouterr()
    for words in (["replay", str(tmp_path / "log.pbtxt"), str(log)], ["inspect", str(log)]):
        assert main(words) == 3
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "log.arrows: batch 1: checksum differs: the batch was damaged after it was written" in error


def test_inspect_says_that_it_is_a_log_with_checksums(tmp_path, capsys):
    (tmp_path / "log").write_bytes(LOG)
    assert main(["inspect", str(tmp_path / "log"), "--json"]) == 0
    out, err = capsys.readouterr()
    (part,) = json.loads(out)["parts"]
    assert (part["batches"], part["frames"], part["verified"]) == (3, 7, True)
    assert "log with checksums" in err
