"""Checkpoints at URIs: a server that speaks S3, where no file is renamed or locked, and a file system's own."""

import logging

import pyarrow.fs
import pytest
from checkpoints import LOG, engine_of, unbroken

import penstock as ps

moto = pytest.importorskip("moto.server", reason="moto is not installed", exc_type=ImportError)
logging.getLogger("werkzeug").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "ACCESS_KEY_ID": "key",
            "SECRET_ACCESS_KEY": "a-secret",
            "EC2_METADATA_DISABLED": "1",
        }.items():
            patch.setenv(f"AWS_{name}", value)
        found = moto.ThreadedMotoServer(port=0)
        found.start()
        host, port = found.get_host_and_port()
        yield f"{host}:{port}"
        found.stop()


@pytest.fixture
def bucket(server, request):
    """The options of a URI, and a bucket for one test."""
    name = f"bucket-{abs(hash(request.node.name))}"
    s3 = pyarrow.fs.S3FileSystem(
        endpoint_override=server, scheme="http", allow_bucket_creation=True, region="us-east-1"
    )
    s3.create_dir(name)
    return s3, name, f"s3://{name}/runs/a?scheme=http&endpoint_override={server}&region=us-east-1"


def names_of(s3, folder):
    return sorted(info.base_name for info in s3.get_file_info(pyarrow.fs.FileSelector(folder)))


def test_a_run_commits_to_s3_and_another_engine_continues(bucket):
    s3, name, uri = bucket
    engine_of().run(iter(LOG), limit=20, checkpoint=uri, every=2, keep=2)
    names = names_of(s3, f"{name}/runs/a")
    assert len([each for each in names if each.endswith(".commit")]) == 2
    engine = ps.Engine.restore(uri)
    assert engine.run(iter(LOG), resume=True, flush=True, checkpoint=uri).skipped == 20
    assert engine.state_hash() == unbroken()
    assert ps.Engine.restore(uri).state_hash() == unbroken()


def test_a_manifest_that_was_not_written_whole_does_not_count_and_is_not_written_over(bucket):
    s3, name, uri = bucket
    engine = engine_of()
    engine.run(iter(LOG), limit=20, checkpoint=uri)
    state, (last,) = engine.state_hash(), [each for each in names_of(s3, f"{name}/runs/a") if each.endswith(".commit")]
    assert last == "00000001.commit"
    with s3.open_input_file(f"{name}/runs/a/{last}") as file:
        text = file.read()
    with s3.open_output_stream(f"{name}/runs/a/00000002.commit") as file:
        file.write(text[: len(text) // 2])
    restored = ps.Engine.restore(uri)
    assert restored.state_hash() == state
    restored.run(iter(LOG), resume=True, flush=True, checkpoint=uri)
    assert "00000003.commit" in names_of(s3, f"{name}/runs/a")
    assert ps.Engine.restore(uri).state_hash() == unbroken()


def test_a_damaged_data_file_is_reported_without_the_options_of_the_uri(bucket):
    s3, name, uri = bucket
    engine_of().run(iter(LOG), limit=20, checkpoint=uri)
    with s3.open_output_stream(f"{name}/runs/a/00000001.base") as file:
        file.write(b"x")
    with pytest.raises(ps.StateError, match=rf"^s3://{name}/runs/a/00000001.base: 1 bytes, expected \d+: cut"):
        ps.Engine.restore(uri)
    with pytest.raises(ps.StateError, match=rf"^s3://{name}/runs/b: no such checkpoint"):
        ps.Engine.restore(uri.replace("/a?", "/b?"))


def test_a_server_that_does_not_answer_is_one_line():
    uri = "s3://bucket/a?scheme=http&endpoint_override=127.0.0.1:1&region=us-east-1"
    with pytest.raises(ps.StateError, match=r"^s3://bucket/a: cannot be read \(.*[Cc]onnect.*\)$"):
        ps.Engine.restore(uri)


def test_a_uri_of_the_file_system_is_its_path(tmp_path):
    engine_of().run(iter(LOG), limit=20, checkpoint=f"file://{tmp_path}/c", every=2)
    assert (tmp_path / "c" / ".lock").exists()
    engine = ps.Engine.restore(tmp_path / "c")
    engine.run(iter(LOG), resume=True, flush=True)
    assert engine.state_hash() == unbroken()


def test_a_uri_of_an_unknown_kind_is_a_usage_error():
    with pytest.raises(ps.UsageError, match=r"checkpoint: no store that pyarrow.fs opens: .*none://a/b"):
        ps.Engine.restore("none://a/b")
