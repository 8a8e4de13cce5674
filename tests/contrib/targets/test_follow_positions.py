"""Stores that are set back, replaced or emptied under a follower, and that a second follower writes to."""

import shutil
import signal
from contextlib import contextmanager

import pytest
from cli import outcome, started
from limits import HANG_S, suspend, until
from services import client_of, service_of
from stores import STORES, STORES_AND_FUNCTION, config_of, frame, open_store, rows_of

import penstock as ps
from penstock.base.errors import StateError, TargetError
from penstock.serving.followers.follower import Follower
from penstock.serving.followers.target import locked


@contextmanager
def follower_of(service, store):
    """A follower that is driven by its rounds."""
    target = store.open_target()
    with client_of(service) as client:
        try:
            yield Follower(client, target, 0.0, 0.0)
        finally:
            target.close()


def catch_up(follower):
    """Follow until the store is current."""
    while not follower.round():
        pass


def pause(target, meanwhile, method="apply"):
    """Let something happen once, before a target's next call of a method, as if the process was stopped there."""
    call = getattr(target, method)

    def paused(*arguments):
        delattr(target, method)
        meanwhile()
        return call(*arguments)

    setattr(target, method, paused)


FRAMES = [frame(step) for step in range(40)]
SET_BACK = ["redis", "lmdb", "lance", "delta", "parquet", "function"]


def options_of(kind):
    return ["--appendonly", "no"] if kind == "redis" else []


@pytest.fixture
def service(tmp_path):
    with service_of(ps.Engine(config_of()), per_steps=1) as running:
        yield running


def is_free(path):
    """Return whether no process holds the lock of a target's file."""
    try:
        with locked(path):
            return True
    except TargetError:
        return False


def put(service, end):
    """Put the frames up to a step."""
    with client_of(service) as client:
        client.put(FRAMES[:end], "w0", first=1)


def follow_to(service, follower, end):
    """Put the frames up to a step, and follow until the store is current."""
    put(service, end)
    catch_up(follower)


# ---- stores that go back


@pytest.mark.parametrize("is_at_rest", [False, True])
@pytest.mark.parametrize("kind", SET_BACK)
def test_a_store_that_is_set_back_under_a_follower_is_brought_up_to_date(kind, is_at_rest, service, tmp_path):
    with open_store(kind, tmp_path, *options_of(kind)) as store, follower_of(service, store) as follower:
        follow_to(service, follower, 5)
        before = store.snapshot()
        follow_to(service, follower, 12)
        store.set_back(before)
        if not is_at_rest:
            put(service, 14)
        catch_up(follower)
        assert store.read() == rows_of(service.engine)
        assert store.step() == service.engine.global_step
        assert (follower.progress.set_back, follower.progress.full_copies) == (1, 1)


@pytest.mark.parametrize("kind", SET_BACK)
def test_a_store_that_is_emptied_under_a_follower_is_filled_again(kind, service, tmp_path):
    with open_store(kind, tmp_path, *options_of(kind)) as store, follower_of(service, store) as follower:
        follow_to(service, follower, 5)
        for end in (5, 9):
            store.empty()
            follow_to(service, follower, end)
            assert store.read() == rows_of(service.engine)
        assert (follower.progress.set_back, follower.progress.full_copies) == (2, 3)


@pytest.fixture(params=["lance", "delta"])
def versions(request, service, tmp_path):
    """A table, and what each of its versions names and holds."""
    with open_store(request.param, tmp_path) as store:
        with follower_of(service, store) as follower:
            states = {}
            for end in (0, 3, 4, 9, 15):
                follow_to(service, follower, end)
                states[store.version()] = store.position(), store.read()
        yield store, states


def test_a_restored_table_is_brought_up_to_date(versions, service, capsys):
    store, states = versions
    words = ("follow", service.address.uri, "--into", store.target, "--once")
    for version in list(states)[:-1]:
        store.restore(version)
        code, done, _ = outcome(capsys, *words)
        assert store.read() == rows_of(service.engine)
        assert (code, done["full_copies"]) == (0, 0)


def test_a_restored_table_names_the_position_of_the_version(versions):
    store, states = versions
    for options in [{}, {"by_time": True}] if store.extra == "delta" else [{}]:
        for version, state in list(states.items()):
            store.restore(version, **options)
            states[store.version()] = state
            assert (store.position(), store.read()) == state
            store.compact()
            assert (store.position(), store.read()) == state


def test_a_table_that_others_changed_names_no_position(versions):
    store, _ = versions
    store.remove_row()
    assert store.position() is None


def test_a_restored_table_whose_version_is_unknown_is_filled_again(versions, service, capsys):
    store, states = versions
    store.restore(min(states))
    store.forget()
    assert store.position() is None
    code, done, _ = outcome(capsys, "follow", service.address.uri, "--into", store.target, "--once")
    assert (code, done["full_copies"]) == (0, 1)
    assert store.read() == rows_of(service.engine)


# ---- two followers


@contextmanager
def two_followers_of(service, kind, folder):
    with (
        open_store(kind, folder, *options_of(kind)) as store,
        follower_of(service, store) as old,
        follower_of(service, store) as new,
    ):
        yield store, old, new


@pytest.mark.parametrize("kind", STORES_AND_FUNCTION)
def test_of_two_followers_the_one_that_is_behind_ends_and_writes_nothing(kind, service, tmp_path):
    with two_followers_of(service, kind, tmp_path) as (store, old, new):
        follow_to(service, old, 5)
        put(service, 10)

        pause(old.target, lambda: follow_to(service, new, 15))
        with pytest.raises(StateError, match="it holds step 15, and this follower has come to step 5; let one"):
            old.round()
        assert store.read() == rows_of(service.engine)
        assert store.position() == ("0", 15)


@pytest.mark.parametrize("kind", [kind for kind in STORES if STORES[kind].is_optimistic])
def test_a_transaction_fails_if_another_follower_writes_after_it_compared(kind, service, tmp_path):
    with two_followers_of(service, kind, tmp_path) as (store, old, new):
        follow_to(service, old, 5)
        put(service, 6)
        compare = old.target.compare

        def another_one_writes_after(stored, before):
            del old.target.compare
            compare(stored, before)
            follow_to(service, new, 15)

        old.target.compare = another_one_writes_after
        with pytest.raises(TargetError):
            old.round()
        assert store.position() == ("0", 15)
        assert store.read() == rows_of(service.engine)


@pytest.mark.parametrize("kind", STORES_AND_FUNCTION)
def test_two_fills_at_once_leave_the_rows_of_one(kind, service, tmp_path):
    with two_followers_of(service, kind, tmp_path) as (store, old, new):
        put(service, 5)

        pause(old.target, lambda: follow_to(service, new, 15), "replace")
        assert not old.round()
        assert store.read() == rows_of(service.engine)
        catch_up(old)  # from there
        assert (old.progress.full_copies, old.progress.step) == (0, 15)


def test_a_fill_of_redis_leaves_no_other_keys(service, tmp_path):
    with open_store("redis", tmp_path) as store, follower_of(service, store) as follower:
        put(service, 5)
        lives = []

        def look(*_):
            del follower.target.compare
            lives.extend(store.client.ttl(key) for key in store.client.keys("penstock-new:*"))
            store.client.hset("penstock-state", mapping={"job": "x", "step": "y"})

        follower.target.compare = look
        with pytest.raises(TargetError):
            follower.round()
        assert lives
        assert min(lives) > 0  # hashes of a follower that is killed go away
        store.empty()
        catch_up(follower)
        assert sorted(store.client.keys()) == [b"penstock-state", b"penstock:item", b"penstock:user"]
        assert store.client.ttl("penstock:item") == -1


def test_a_follower_that_was_stopped_ends_with_a_line_when_it_continues(service, tmp_path, capsys):
    with open_store("parquet", tmp_path) as store:
        following = started("follow", service.address.uri, "--into", store.target, "--interval", "0.05")
        until(lambda: (store.path / "current").exists())
        # The link appears within the first transaction. Stopped there, the follower would keep the lock.
        until(lambda: is_free(store.path / ".lock"))
        suspend(following)
        put(service, 7)
        assert outcome(capsys, "follow", service.address.uri, "--into", store.target, "--once")[0] == 0
        following.send_signal(signal.SIGCONT)
        _, line = following.communicate(timeout=HANG_S)
        assert following.returncode == 5
        assert line.decode() == (
            f"penstock: {store.target}: another follower is ahead: it holds step 7, and this follower has come to "
            "step 0; let one follower write to it, and end the other ones\n"
        )


def test_a_folder_or_a_state_that_another_process_writes_is_waited_for(service, tmp_path):
    for kind in ("parquet", "function"):
        with two_followers_of(service, kind, tmp_path / kind) as (store, old, new):
            (tmp_path / kind).mkdir()
            catch_up(old)
            catch_up(new)
            put(service, service.engine.global_step + 1)
            compare = old.target.compare

            def another_one_tries(stored, before, old=old, new=new, compare=compare):
                del old.target.compare
                compare(stored, before)
                with pytest.raises(TargetError, match="another process is writing there"):
                    new.round()

            old.target.compare = another_one_tries
            catch_up(old)
            assert store.read() == rows_of(service.engine)


# ---- one follower


def test_a_transaction_whose_answer_was_lost_is_not_another_follower(service, tmp_path):
    with open_store("parquet", tmp_path) as store, follower_of(service, store) as follower:
        catch_up(follower)
        put(service, 5)
        apply = follower.target.apply

        def apply_and_fail(*arguments):
            del follower.target.apply
            apply(*arguments)
            raise TargetError("the connection broke")

        follower.target.apply = apply_and_fail
        with pytest.raises(TargetError):
            follower.round()
        follow_to(service, follower, 6)
        assert store.read() == rows_of(service.engine)
        assert (follower.progress.full_copies, follower.progress.set_back) == (1, 0)


def test_all_tables_of_a_fill_have_the_rows_of_the_step_that_it_names(service, tmp_path):
    with open_store("parquet", tmp_path) as store, follower_of(service, store) as follower:
        put(service, 5)
        fetch = follower.client.table

        def fetch_and_push(name, rows):
            table = fetch(name, rows=rows)
            put(service, 9)
            return table

        follower.client.table = fetch_and_push
        assert not follower.round()
        assert store.position() == ("0", 9)
        assert store.read() == rows_of(service.engine)


@pytest.mark.parametrize("kind", STORES_AND_FUNCTION)
def test_a_service_that_went_back_to_an_older_commit_fills_the_store_again(kind, tmp_path):
    folder, backup = tmp_path / "c", tmp_path / "backup"
    with open_store(kind, tmp_path, *options_of(kind)) as store:
        with service_of(ps.Engine(config_of()), folder) as service:
            put(service, 5)
            shutil.copytree(folder, backup)
            put(service, 12)
            with follower_of(service, store) as follower:
                catch_up(follower)
        with service_of(ps.Engine.restore(backup), backup, resume=True) as service:
            with client_of(service) as client:
                client.put(FRAMES[20:30], "w0")
            with follower_of(service, store) as follower:
                catch_up(follower)
                assert (follower.progress.full_copies, follower.progress.step) == (1, 15)
                assert store.read() == rows_of(service.engine)
