"""Our own log, damaged, cut, mixed up or never finished: an error each time, and no wrong row before it."""

import io
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from evidence import IS_EVIDENCE, more_as_evidence
from ipc import log, messages, stream
from logs import BATCHES, LOG, SIZES, SMALL, WANTED, batch_of, read
from scripts import ROOT

from penstock.base.errors import InputError, TruncatedInputError, UsageError
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.log import LogWriter
from penstock.io.sources.opening import open_source

# ---- damage

FLIPS = """
import io, pathlib, sys
sys.path.insert(0, sys.argv[2])
from penstock.base.errors import PenstockError
from ipc import log, stream
from logs import SMALL_WANTED, read
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


@pytest.mark.promise("A changed bit of a log is found")
@pytest.mark.evidence
def test_every_flip_of_a_single_bit_is_an_error_or_changes_nothing(tmp_path):
    (tmp_path / "log").write_bytes(SMALL)
    folder = str(ROOT / "tests" / "support")
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


@more_as_evidence
def test_every_cut_is_an_error(tmp_path):
    for length in range(0, len(SMALL), 1 if IS_EVIDENCE else 5):
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
    head, pieces, end = messages(log([b.drop_columns(["table", "note"]) for b in BATCHES]))
    with pytest.raises(InputError, match=problem):
        read(io.BytesIO(head + b"".join(pieces[n] for n in order) + end), table="user")


def test_a_batch_of_another_log_with_the_same_number():
    head, pieces, end = messages(LOG)
    others = messages(log([batch_of(3), batch_of(4), BATCHES[2]]))[1]
    with pytest.raises(InputError, match=r"batch 1: checksum differs: the batch was damaged after it was written"):
        read(io.BytesIO(head + pieces[0] + others[1] + b"".join(pieces[2:]) + end))


def test_no_batch_is_handed_on_before_its_checksum_was_seen_to_fit():
    offset = LOG.index(np.float32([1.5, 0.25]).tobytes())  # the first gradient of batch 1
    damaged = bytearray(LOG)
    damaged[offset] ^= 1
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
    again = stream(opened.read_all().to_batches(), schema=opened.schema)
    with pytest.raises(InputError, match=r"carries no checksum.*take 'penstock.log' out of the schema's metadata"):
        read(io.BytesIO(again))


def test_a_log_of_a_later_version_is_refused():
    with pytest.raises(InputError, match="version 2; this penstock reads version 1"):
        read(io.BytesIO(LOG.replace(b"\1\0\0\x001\0", b"\1\0\0\x002\0")))


# ---- writers that end early


def test_a_log_of_a_killed_writer_is_truncated(tmp_path):
    code = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from penstock.io.log import LogWriter
from ipc import log, stream
from logs import BATCHES
file = open(sys.argv[1], "wb", buffering=0)
log = LogWriter(file, BATCHES[0].schema)
log.write(BATCHES[0])
log.write(BATCHES[1])
named = LogWriter(sys.argv[1] + ".named", BATCHES[0].schema)
named.write(BATCHES[0])
os.kill(os.getpid(), signal.SIGKILL)
"""
    folder = str(ROOT / "tests" / "support")
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
