"""``penstock follow --into shared:DIR``: what is particular to files that readers have mapped."""

from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from cli import outcome, started
from services import client_of, service_of
from stores import Shared, config_of, frame, rows_of

import penstock as ps
from penstock.serving.followers.follower import Follower

FRAMES = [frame(step) for step in range(60)]


def follower_of(service, store):
    return Follower(client_of(service), store.open_target(), patience_s=0.1, interval_s=0.01)


def test_a_reader_stays_open_while_followers_apply_deltas_grow_the_table_and_replace_each_other(tmp_path):
    store = Shared(tmp_path)
    dynamic = ps.Dynamic()
    tables = [ps.TableConfig(1 << 15, 3, name="user", optimizer=ps.SGD(0.5), dynamic=dynamic)]
    engine = ps.Engine(ps.EmbeddingConfig.from_tables(tables))
    with service_of(engine) as service, client_of(service) as client:
        follower_of(service, store).run(once=True)
        reader = ps.Reader(store.path)
        keys = np.arange(-20_000, 0)
        for number, part in enumerate(np.split(keys, 4), 1):
            client.put([ones(part, 3)], "w0")
            another = follower_of(service, store)
            another.run(once=True)
            another.target.close()
            assert (reader.version.step, reader.durable_step, another.progress.full_copies) == (number, number, 0)
            np.testing.assert_array_equal(reader.lookup("user", keys), engine.lookup("user", keys))


def ones(ids, dim):
    return pa.record_batch({"id": ids, "gradient": [np.ones(dim, np.float32)] * len(ids)})


def test_it_follows_tables_that_start_from_vectors_and_are_trained_from_a_step_on(tmp_path):
    store, keys, vectors = Shared(tmp_path), np.arange(5, 9), np.random.default_rng(0).normal(size=(4, 3))
    np.savez(tmp_path / "vectors.npz", keys=keys, rows=vectors.astype(np.float32))
    user = ps.TableConfig(
        64, 3, ps.FromFile(tmp_path / "vectors.npz"), ps.Adagrad(0.5), name="user", dynamic=ps.Dynamic(),
        trainable=False, until_step=2,
    )  # fmt: skip
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([user]))
    with service_of(engine, tmp_path / "c") as service, client_of(service) as client:
        for step in range(5):
            client.put([ones(keys[:2], 3)], "w0")
            client.checkpoint()
            follower = follower_of(service, store)
            follower.run(once=True)
            follower.target.close()
            assert follower.progress.full_copies == (step in (0, 1))  # at the start, and where slots begin
            rows = ps.Reader(store.path).lookup("user", range(10))
            np.testing.assert_array_equal(rows, engine.lookup("user", range(10)))
            np.testing.assert_array_equal(rows[7:9], vectors[2:].astype(np.float32))


@pytest.mark.parametrize("missing", ["initial", "zero"])
@pytest.mark.parametrize("initializer", [ps.Constant(2.0), ps.TruncatedNormal(0.5, 0.1), ps.Uniform(-1.0, 1.0)])
def test_an_absent_key_reads_as_in_the_engine(missing, initializer, tmp_path):
    store, dynamic = Shared(tmp_path), ps.Dynamic(missing=missing)
    table = ps.TableConfig(64, 4, initializer, ps.SGD(0.5), name="user", dynamic=dynamic)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    with service_of(engine) as service, client_of(service) as client:
        for step in range(2):  # the second follower continues the store, without a full copy
            client.put([ones([5 + step], 4)], "w0")
            follower = follower_of(service, store)
            follower.run(once=True)
            assert follower.progress.full_copies == 1 - step
            np.testing.assert_array_equal(
                ps.Reader(store.path).lookup("user", [5, 6, 7, -8]), engine.lookup("user", [5, 6, 7, -8])
            )


def test_after_a_kill_readers_refuse_or_read_the_rows_of_the_step_and_a_follower_repairs_it(tmp_path, capsys):
    store = Shared(tmp_path)
    with service_of(ps.Engine(config_of()), per_steps=1) as service, client_of(service) as client:
        follower_of(service, store).run(once=True)
        states = {0: rows_of(service.engine)}
        for _ in range(4):
            following = started("follow", service.address.uri, "--into", store.target, "--interval", "0.01")
            begin = max(states)
            while store.step() <= begin:
                step = max(states) + 1
                client.put(FRAMES[step % 60 : step % 60 + 1], "w0", first=step)
                states[step] = rows_of(service.engine)
            following.kill()
            following.communicate()
            with suppress(ps.StateError):  # the kill interrupted a write to these rows
                assert store.read() == states[store.step()]
        code, _, text = outcome(capsys, "follow", service.address.uri, "--into", store.target, "--once")
        assert code == 0, text
        assert store.read() == rows_of(service.engine)


def test_readers_refuse_an_interrupted_transaction_and_the_next_follower_writes_a_full_copy(tmp_path):
    store = Shared(tmp_path)
    with service_of(ps.Engine(config_of()), per_steps=1) as service, client_of(service) as client:
        follower = follower_of(service, store)
        follower.run(once=True)
        target = follower.target
        target._writer.lock()
        target._writer._folder.words.begin()  # as if a kill came right after this write
        target._writer.close()
        with ps.Reader(store.path) as reader, pytest.raises(ps.StateError, match="its writer has ended"):
            reader.lookup("item", [1], consistent=True)
        assert target.stored() is None
        client.put(FRAMES[:3], "w0")
        another = follower_of(service, store)
        another.run(once=True)
        assert another.progress.full_copies == 1
        assert store.read() == rows_of(service.engine)


def test_a_folder_that_an_engine_shares_is_refused(tmp_path, capsys):
    store = Shared(tmp_path)
    engine = ps.Engine(config_of(), shared=store.path)
    with service_of() as service:
        code, _, text = outcome(capsys, "follow", service.address.uri, "--into", store.target, "--once", "--replace")
    assert code == 5
    assert "the tables there are those of replay or serve with --shared; use another folder" in text
    assert ps.Reader(store.path).version.step == engine.global_step


def test_a_follower_waits_for_another_writer_of_the_folder(tmp_path):
    store = Shared(tmp_path)
    with service_of(ps.Engine(config_of()), per_steps=1) as service, client_of(service) as client:
        first, second = follower_of(service, store), follower_of(service, store)
        first.run(once=True)
        second.run(once=True)
        client.put(FRAMES[:1], "w0")
        first.target._writer.lock()
        with pytest.raises(ps.PenstockError, match="another program writes the shared tables of this folder"):
            second.run(once=True)
        first.target._writer.close()
        second.run(once=True)
        assert store.read() == rows_of(service.engine)
        assert [each.progress.full_copies for each in (first, second)] == [1, 0]
        with pytest.raises(ps.StateError, match="another follower is ahead: it holds step 1"):
            first.run(once=True)


def test_a_folder_with_other_files_is_exit_2(tmp_path, capsys):
    store = Shared(tmp_path)
    store.path.mkdir()
    (store.path / "notes.txt").write_text("x")
    with service_of() as service:
        code, _, text = outcome(capsys, "follow", service.address.uri, "--into", store.target, "--once")
    assert code == 2
    assert "holds other files (notes.txt); choose a new folder" in text
