"""Every command takes every URI that ``replay`` takes, and prints none of its keys."""

import itertools

import pyarrow.fs
import pyarrow.parquet
import pytest
from cli import ONE_TABLE, frame, outcome
from ipc import log, stream
from s3_server import SECRET

import penstock as ps
from penstock.cli import main

FRAMES = [frame(step) for step in range(6)]
NUMBERS = itertools.count()
# Names of logs in a folder, and what names them.
LOGS = {
    "stream": "logs/a.arrows",
    "file": "logs/b.arrow",
    "checksums": "logs/c.arrows",
    "parquet": "logs/d.parquet",
    "directory": "days",
    "keys": "days/day=1",
    "glob": "days/*/*.arrows",
}
# Commands that read gradients; Words in capitals stand for what the test has.
READING = [
    "replay CONFIG URI",
    "validate CONFIG URI",
    "plan DYNAMIC URI",
    "blame CONFIG URI --table user --id 1",
    "inspect URI",
    "replay CONFIG URI --deltas DELTAS",
    "inspect DELTAS",
]
# Commands that read or write a checkpoint, in an order in which each can run.
CHECKPOINTS = [
    "replay CONFIG LOG --checkpoint URI --every 2 --limit 4",
    "replay CONFIG LOG --checkpoint URI --resume",
    "inspect URI",
    "log URI",
    "tag URI good",
    "inspect GOOD",
    "log URI",
    "diff URI GOOD",
    "history URI --table user --id 1",
    "export GOOD OUT",
    "branch URI NEW --at good",
    "rollback NEW --to 6",
    "tag URI --delete good",
]


@pytest.fixture(params=["file", "s3"])
def place(request, tmp_path):
    """Return the URI of a name in a new folder, and write the logs there."""
    if request.param == "s3":
        bucket = request.getfixturevalue("buckets")(f"uris-{next(NUMBERS)}")
        uri_of = lambda name: bucket.uri.replace("/runs/a?", f"/{name}?")  # noqa: E731
    else:
        uri_of = lambda name: f"file://{tmp_path}/remote/{name}"  # noqa: E731
    contents = {LOGS["stream"]: stream(FRAMES), LOGS["checksums"]: log(FRAMES)}
    contents[LOGS["file"]] = stream(FRAMES, make=pyarrow.ipc.new_file)
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_batches(FRAMES), sink)
    contents[LOGS["parquet"]] = sink.getvalue().to_pybytes()
    contents["days/day=1/a.arrows"] = stream(FRAMES)
    for name, data in contents.items():
        fs, path = pyarrow.fs.FileSystem.from_uri(uri_of(name))
        fs.create_dir(path.rpartition("/")[0])
        with fs.open_output_stream(path) as file:
            file.write(data)
    return uri_of


@pytest.fixture
def run(tmp_path, capsys):
    """Run a command whose words may stand for others; it succeeds, and prints no key. Returns its result."""
    config = tmp_path / "tables.pbtxt"
    config.write_text(ONE_TABLE)
    dynamic = tmp_path / "dynamic.pbtxt"
    table = ps.TableConfig(50, 2, name="user", optimizer=ps.SGD(0.1), dynamic=ps.Dynamic())
    ps.EmbeddingConfig.from_tables([table]).save(dynamic)

    def run(line, **words):
        words = {"CONFIG": config, "DYNAMIC": dynamic, "OUT": tmp_path / "out", **words}
        command = [words.get(word, word) for word in line.split()]
        assert main([*map(str, command)]) == 0, capsys.readouterr().err
        printed = "".join(capsys.readouterr())
        code, result, error = outcome(capsys, *command) if command[0] in {"inspect", "log"} else (0, None, "")
        assert code == 0, error
        assert SECRET not in printed + error + str(result)
        assert "endpoint_override" not in printed
        return printed, result

    return run


def test_every_command_that_reads_gradients_reads_every_uri(place, run):
    hashes = set()
    for name in LOGS.values():
        for line in READING:
            printed, _ = run(line, URI=place(name), DELTAS=place("deltas.arrows"))
            if line.startswith("replay"):
                hashes.add(next(text for text in printed.splitlines() if text.startswith("state")))
                assert ("that were not read: day\n" in printed) == name.startswith("days")
    assert len(hashes) == 1


def test_every_command_that_takes_a_checkpoint_takes_every_uri(place, run):
    words = {"LOG": place(LOGS["checksums"]), "URI": place("run"), "GOOD": place("run@good"), "NEW": place("new")}
    results = [run(line, **words) for line in CHECKPOINTS]
    shown = dict(zip(CHECKPOINTS, results, strict=True))
    assert shown["inspect URI"][1]["kind"] == "checkpoint"
    assert shown["inspect GOOD"][0].splitlines()[1].startswith("  step 6, ")
    assert "? rows" not in shown["log URI"][0]
    rows = [each["rows"] for each in shown["log URI"][1]["commits"] if not each["base"]]
    assert rows == [3] * len(rows) != []  # the ids 1, 2 and 3
