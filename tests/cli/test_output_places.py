"""What a URI names, and what commands write: never a folder named like a URI, nor a file that they read."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli import ONE_TABLE, frame
from ipc import write

import penstock as ps
from penstock.cli import main

CONFIG = ONE_TABLE
URI = "s3://a-key:a-secret@bucket/tables?region=us-east-1"
COMMANDS = [
    "replay CONFIG LOG --out URI",
    "replay CONFIG LOG --init URI",
    "replay CONFIG LOG --report URI",
    "replay CONFIG LOG --metrics-file URI",
    "replay CONFIG LOG --shared URI",
    "replay CONFIG LOG --on-bad-row quarantine=URI",
    "serve CONFIG --out URI",
    "serve --replica URI",
    "blame CONFIG LOG --table user --id 1 --out URI",
    "history CHECKPOINT --table user --id 1 --out URI",
    "inspect LOG --report URI",
    "import URI CHECKPOINT --config CONFIG",
    "export CHECKPOINT URI",
    "synth URI",
    "demo --dir URI",
]


@pytest.fixture
def log(tmp_path):
    return write(tmp_path / "log.arrows", [frame(0), frame(1)])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_uri_is_no_name_of_a_local_file(tmp_path, log, config, refused, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    names = {
        "CONFIG": str(config),
        "LOG": str(log),
        "URI": URI,
        "CHECKPOINT": "c",
        "quarantine=URI": f"quarantine={URI}",
    }
    line = refused(2, *(names.get(word, word) for word in command.split()))
    assert "a-secret" not in line
    assert "a-key" not in line
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("s3")]


@pytest.mark.parametrize(
    "command",
    [
        "validate URI",
        "replay URI LOG",
        "replay CONFIG OTHER",
        "replay CONFIG s3://a-key:a-secret@bucket/x?region=*",
        "log OTHER",
        "branch CHECKPOINT OTHER",
        "follow URI --into parquet:out",
        "follow grpc://127.0.0.1:1 --into URI",
        "status URI",
        "serve CONFIG --listen URI",
        "serve CONFIG --kafka URI",
        "completion URI",
    ],
)
def test_errors_print_no_credentials_of_a_uri(tmp_path, log, config, capsys, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    names = {"CONFIG": config, "LOG": log, "URI": URI, "OTHER": URI.replace("s3", "s4"), "CHECKPOINT": "c"}
    assert main([str(names.get(word, word)) for word in command.split()]) in (2, 3, 4)
    text = "".join(capsys.readouterr())
    assert text.startswith("penstock: ")
    assert text.count("\n") == 1
    assert "a-secret" not in text
    assert "a-key" not in text


@pytest.mark.parametrize(
    "query",
    [
        "password=a-secret",
        "region=eu-1&access_key=a-secret&secret_key=a-secret",
        "token=a-secret",
        "sv=2024&sig=a-secret%3D",
        "sas=a-secret@b",
        "X-Amz-Signature=a-secret/a-secret",
    ],
)
def test_errors_print_no_credentials_of_the_options_of_a_uri(config, capsys, query):
    for place in (f"s4://bucket/log?{query}", f"nats:bucket?{query}", f"grpc://h:1/p?{query}"):
        assert main(["replay", str(config), place]) in (2, 3)
        assert "a-secret" not in "".join(capsys.readouterr())
    error = ps.InputError("gone", source=f"x://bucket/log?{query}&step=3&keys=7")
    assert str(error).startswith("x://bucket/log?")
    assert str(error).endswith("=…&step=3&keys=7: gone")
    assert "=…: gone" in str(ps.UsageError(f"x://h?{query}: gone"))


def test_methods_take_no_uri_for_a_local_folder(tmp_path, config, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = ps.Engine(ps.EmbeddingConfig.load(config))
    for call in (engine.write_tables, engine.read_tables, ps.Reader):
        with pytest.raises(
            ps.UsageError, match="expected a path of this machine, got a URI; copy to or from"
        ) as caught:
            call(URI)
        assert "a-secret" not in str(caught.value)


def test_no_command_replaces_its_source(tmp_path, config, refused):
    """A folder with a log per table is a natural place for --out, whose files have the same names."""
    logs = tmp_path / "logs"
    logs.mkdir()
    pq.write_table(pa.Table.from_batches([frame(0), frame(1)]), logs / "user.parquet")
    (tmp_path / "link.parquet").symlink_to(logs / "user.parquet")
    before = (logs / "user.parquet").read_bytes()
    for source in (logs, logs / "user.parquet", tmp_path / "link.parquet", f"{logs}/*.parquet"):
        for words in (
            ("replay", config, source, "--out", logs),
            ("replay", config, source, "--metrics-file", logs / "user.parquet"),
            ("blame", config, source, "--table", "user", "--id", "1", "--out", logs / "user.parquet"),
        ):
            assert "user.parquet: is read as a source, and would be replaced; give the output" in refused(2, *words)
            assert (logs / "user.parquet").read_bytes() == before
