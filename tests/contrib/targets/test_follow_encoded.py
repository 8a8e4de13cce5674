"""``penstock follow --rows``: stores that hold rows in 16 or 8 bits per value."""

import json

import numpy as np
import pytest
from cli import error_line, outcome
from services import client_of, service_of
from stores import STORES, STORES_AND_FUNCTION, Shared, config_of, frame, open_store, rows_of

import penstock as ps
from penstock.model.row_encodings import INT8
from penstock.serving.followers.follower import Follower
from penstock.serving.service.limits import Limits

FRAMES = [frame(step) for step in range(60)]
LAKES = ["lance", "delta"]
TAKING = [name for name in STORES_AND_FUNCTION if name not in LAKES]
ENCODED = ["bfloat16", "int8"]


@pytest.fixture(params=TAKING)
def store(request, tmp_path):
    with open_store(request.param, tmp_path) as target:
        yield target


def follow(capsys, service, store, rows):
    """Follow until the store is current. Returns what the command prints."""
    if isinstance(store, Shared):
        store.rows = rows
    flags = ("--into", store.target, "--once", "--rows", rows, *store.flags)
    code, printed, text = outcome(capsys, "follow", service.address.uri, *flags)
    assert code == 0, text
    return printed


@pytest.mark.parametrize("rows", ENCODED)
def test_a_store_has_the_encoded_rows_of_the_tables_after_deltas_gaps_and_a_rollback(rows, store, tmp_path, capsys):
    limits = Limits(delta_bytes=4000)
    saving = {"folder": tmp_path / "c", "every": 1, "limits": limits}
    with service_of(ps.Engine(config_of()), **saving) as service, client_of(service) as client:
        assert follow(capsys, service, store, rows)["full_copies"] == 1
        for end in (2, 4):
            client.put(FRAMES[:end], "w0", first=1)
            done = follow(capsys, service, store, rows)
            assert (done["full_copies"], done["step"]) == (0, end)
            assert store.read() == rows_of(service.engine, rows)
        ps.tag(tmp_path / "c", "good")
        client.put(FRAMES, "w0", first=1)
        assert follow(capsys, service, store, rows)["full_copies"] == 1  # deltas are gone
        assert store.read() == rows_of(service.engine, rows)
        client.rollback("good")
        done = follow(capsys, service, store, rows)
        assert done["step"] == store.step() == 61
        assert store.read() == rows_of(service.engine, rows)
        assert follow(capsys, service, store, rows)["transactions"] == 0


def test_tables_of_several_dims_share_a_store(store, capsys):
    with service_of(ps.Engine(config_of(item_dim=7))) as service:
        follow(capsys, service, store, "int8")
        assert store.read() == rows_of(service.engine, "int8")


@pytest.mark.parametrize("name", [name for name in TAKING if name not in ("redis", "kafka")])
def test_another_encoding_fills_the_store_again(name, tmp_path, capsys):
    with open_store(name, tmp_path) as store, service_of(ps.Engine(config_of()), per_steps=1) as service:
        with client_of(service) as client:
            client.put(FRAMES[:20], "w0")
        for rows in ("float32", "int8", "bfloat16", "float32"):
            done = follow(capsys, service, store, rows)
            assert (done["full_copies"], done["step"]) == (1, 20)
            assert store.read() == rows_of(service.engine, rows)
            assert follow(capsys, service, store, rows)["full_copies"] == 0


def followers_of(service, store, *rows):
    for each in rows:
        yield Follower(client_of(service), store.open_target(), patience_s=0.1, interval_s=0.01, rows=each)


@pytest.fixture
def shared(tmp_path):
    return Shared(tmp_path)


def test_of_two_followers_with_other_encodings_one_ends(shared):
    with service_of(ps.Engine(config_of()), per_steps=1) as service:
        first, second = followers_of(service, shared, "float32", "int8")
        first.run(once=True)
        second.run(once=True)
        with pytest.raises(ps.StateError, match="another follower has written rows of int8, and this one th"):
            first.run(once=True)
        second.run(once=True)
        assert second.progress.full_copies == 1


def test_a_store_that_was_set_back_to_another_encoding_is_filled_again(shared):
    with service_of(ps.Engine(config_of()), per_steps=1) as service, client_of(service) as client:
        (before,) = followers_of(service, shared, "float32")
        before.run(once=True)
        before.target.close()
        copy = shared.snapshot()
        client.put(FRAMES[:5], "w0")
        (follower,) = followers_of(service, shared, "int8")
        follower.run(once=True)
        follower.target.close()
        shared.set_back(copy)
        follower.run(once=True)
        assert (follower.progress.set_back, follower.progress.full_copies) == (1, 2)
        shared.rows = "int8"
        assert shared.read() == rows_of(service.engine, "int8")


def test_another_follower_continues_the_shared_files(shared):
    with service_of(ps.Engine(config_of()), per_steps=1) as service, client_of(service) as client:
        for end in (10, 30):
            client.put(FRAMES[:end], "w0", first=1)
            (follower,) = followers_of(service, shared, "int8")
            follower.run(once=True)
            follower.target.close()
        assert follower.progress.full_copies == 0
        reader = ps.Reader(shared.path)
        keys = reader.keys("user")
        assert (
            reader.lookup("user", keys).tobytes()
            == INT8.decode(INT8.encode(service.engine.lookup("user", keys))).tobytes()
        )
        absent = np.array([2**63 + 5], np.uint64)
        wanted = INT8.decode(INT8.encode(service.engine.lookup("user", absent)))
        assert reader.lookup("user", absent).tobytes() == wanted.tobytes()
        with ps.Reader(shared.path, dtype="int8") as encoded:
            assert encoded.lookup("user", absent).shape == (1, 4 + 8)


def test_a_function_is_told_the_encoding(tmp_path, capsys, monkeypatch):
    import function_rows

    schemas = []
    monkeypatch.setattr(function_rows, "update", lambda batch, step: schemas.append(batch.schema))
    with open_store("function", tmp_path) as store, service_of(ps.Engine(config_of()), per_steps=1) as service:
        follow(capsys, service, store, "int8")
        with client_of(service) as client:
            client.put(FRAMES[:2], "w0")
        follow(capsys, service, store, "int8")
    assert len(schemas) > 3
    assert {schema.metadata[b"penstock.rows"] for schema in schemas} == {b"int8"}


@pytest.mark.parametrize("name", LAKES)
def test_a_lake_takes_lists_of_float32_only(name, tmp_path, capsys):
    with open_store(name, tmp_path) as store, service_of(ps.Engine(config_of())) as service:
        flags = ("--into", store.target, "--once", "--rows", "int8")
        line = error_line(capsys, 2, "follow", service.address.uri, *flags)
        assert f"--rows int8 (rows=): {store.target} holds rows as lists of float32; omit it" in line
        assert not store.path_exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rows": "int4"}, "rows: expected float32, bfloat16, int8, got 'int4'; use another target"),
        ({"penstock.target": 3}, "expected what penstock stores in format 1 or 2, got 3; use another target"),
    ],
)
def test_a_state_of_later_versions_is_refused_by_name(change, problem, tmp_path, capsys):
    with open_store("parquet", tmp_path) as store, service_of(ps.Engine(config_of())) as service:
        follow(capsys, service, store, "int8")
        path = store.path / "current" / "penstock.json"
        state = json.loads(path.read_text())
        assert (state["job"]["penstock.target"], state["job"]["rows"]) == (2, "int8")  # earlier versions refuse 2
        state["job"] |= change
        path.write_text(json.dumps(state))
        flags = ("--into", store.target, "--once", "--rows", "int8")
        assert problem in error_line(capsys, 5, "follow", service.address.uri, *flags)


def test_a_replica_of_encoded_files_answers_in_float32(shared, capsys):
    from penstock.serving.flight.connection import Address
    from penstock.serving.service.replica import ReplicaService

    with service_of(ps.Engine(config_of()), per_steps=1) as service, client_of(service) as client:
        client.put(FRAMES[:10], "w0")
        follow(capsys, service, shared, "int8")
        wanted = {
            "item": INT8.decode(INT8.encode(service.engine.lookup("item", range(30)))),
        }
    replica = ReplicaService(ps.Reader(shared.path), Address("127.0.0.1", 0, False))
    try:
        with ps.connect(replica.address.uri) as client:
            assert client.lookup("item", range(30)).tobytes() == wanted["item"].tobytes()
            assert client.table("item").rows.tobytes() == wanted["item"].tobytes()
            with pytest.raises(ps.UsageError, match="the ticket: expected table, got table, rows"):
                client.table("item", rows="int8")
    finally:
        replica.close(0.1)


def test_every_store_is_tested():
    assert {*TAKING, *LAKES} >= STORES.keys()
