"""Checkpoints at URIs: a server that speaks S3, where no file is renamed or locked, and the file system's own."""

import itertools

import pytest
from checkpoints import LOG, config_of, engine_of, unbroken
from ipc import write
from s3_server import SECRET

import penstock as ps
from penstock.checkpoint.store import Folder
from penstock.checkpoint.versions import NamedCommit, branch, delete_tag
from penstock.cli.main import main

NUMBERS = itertools.count()


@pytest.fixture
def bucket(buckets):
    return buckets(f"bucket-{next(NUMBERS)}")


def test_a_run_commits_to_s3_and_another_engine_continues(bucket):
    engine_of().run(iter(LOG), limit=20, checkpoint=bucket.uri, every=2, keep=2)
    assert len([name for name in bucket.names() if name.endswith(".commit")]) == 2
    engine = ps.Engine.restore(bucket.uri)
    assert engine.run(iter(LOG), resume=True, flush=True, checkpoint=bucket.uri).skipped == 20
    assert engine.state_hash() == unbroken()
    assert ps.Engine.restore(bucket.uri).state_hash() == unbroken()


def test_a_manifest_that_was_not_written_whole_does_not_count_and_is_not_written_over(bucket):
    engine = engine_of()
    engine.run(iter(LOG), limit=20, checkpoint=bucket.uri)
    state, whole = engine.state_hash(), bucket.read("00000001.commit")
    bucket.write("00000002.commit", whole[: len(whole) // 2])
    restored = ps.Engine.restore(bucket.uri)
    assert restored.state_hash() == state
    restored.run(iter(LOG), resume=True, flush=True, checkpoint=bucket.uri)
    assert "00000003.commit" in bucket.names()
    assert bucket.read("00000002.commit") == whole[: len(whole) // 2]
    assert ps.Engine.restore(bucket.uri).state_hash() == unbroken()


def test_damage_is_reported_without_the_secrets_of_the_uri(bucket):
    engine_of().run(iter(LOG), limit=20, checkpoint=bucket.uri)
    bucket.write("00000001.base", b"x")
    with pytest.raises(ps.StateError, match=rf"^s3://{bucket.name}/runs/a/00000001\.base: 1 bytes, .*: cut") as error:
        ps.Engine.restore(bucket.uri)
    assert SECRET not in str(error.value)
    with pytest.raises(ps.StateError, match=rf"^s3://{bucket.name}/runs/b: no such checkpoint"):
        ps.Engine.restore(bucket.uri.replace("/a?", "/b?"))


def test_the_command_commits_to_s3_and_resumes(bucket, tmp_path, capsys):
    config_of().save(tmp_path / "c.pbtxt")
    log = write(tmp_path / "log.arrows", LOG)
    line = ["replay", tmp_path / "c.pbtxt", log, "--num-required", 3, "--checkpoint", bucket.uri]
    assert main([*map(str, line), "--limit", "20"]) == 0
    assert SECRET not in capsys.readouterr().out
    assert main([*map(str, line)]) == 2
    assert f"s3://{bucket.name}/runs/a: holds a checkpoint; resume it (--resume)" in capsys.readouterr().err
    assert main([*map(str, line), "--resume", "--flush"]) == 0
    assert unbroken() in capsys.readouterr().out


@pytest.mark.evidence
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


def test_tags_and_branches_of_s3(bucket, tmp_path, capsys):
    engine = engine_of()
    engine.run(iter(LOG), limit=20, checkpoint=bucket.uri)
    half = engine.state_hash()
    ps.tag(bucket.uri, "half")
    with pytest.raises(ps.UsageError, match=rf"s3://{bucket.name}/runs/a: tag 'half' names step 6 already"):
        ps.tag(bucket.uri, "half")
    for step in range(4):
        engine.run(iter(LOG), limit=24 + 3 * step, checkpoint=bucket.uri, resume=True, keep=1)
    at_half = bucket.uri.replace("/a?", "/a@half?")
    assert ps.Engine.restore(at_half).state_hash() == half
    assert main(["diff", at_half, at_half]) == 0
    assert main(["history", bucket.uri, "--table", "user", "--id", "1"]) == main(["log", bucket.uri]) == 0
    assert SECRET not in "".join(capsys.readouterr())
    new = bucket.uri.replace("/a?", "/b?")
    branch(NamedCommit.of(at_half), new)
    branch(NamedCommit.of(new), tmp_path / "local")
    for place in (new, tmp_path / "local"):
        restored = ps.Engine.restore(place)
        restored.run(iter(LOG), checkpoint=place, resume=True, flush=True)
        assert restored.state_hash() == unbroken()
    delete_tag(Folder(bucket.uri), "half")
    with pytest.raises(ps.StateError, match=rf"^s3://{bucket.name}/runs/a: no tag 'half'; it has no tags") as error:
        ps.Engine.restore(at_half)
    assert SECRET not in str(error.value)
