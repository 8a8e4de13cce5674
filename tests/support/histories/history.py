"""One history: random events, each followed by the check that the store has the rows of the position that it names."""

import numpy as np

from histories.world import World, chosen

EVENTS = 12


def run(store, folder, seed, number):
    """Run one history into an empty store. Returns counts; an error has what happened as its notes."""
    draw = np.random.default_rng([seed, number])
    world = World(store, folder, draw)
    try:
        for number in (0, 1):
            _push(world)
            world.follow_anew(number, world.copies[0])
            _follow(world, number)
        for _ in range(EVENTS):
            _event(world, _ALWAYS + _ALONE)
            world.check()
        world.log.append("the end")
        world.check_end()
    except Exception as error:
        error.__notes__ = [*getattr(error, "__notes__", []), *world.log]
        raise
    finally:
        world.close()
    return {"checks": EVENTS + 1, "named": world.num_named, "ended": world.num_ended}


def _event(world, events):
    """Do one of these, which begin with an underscore."""
    if not hasattr(world.store, "set_back"):  # a topic
        events = [event for event in events if event not in (_store_goes_back, _empty)]
    event = chosen(world.draw, events)
    world.log.append(event.__name__[1:].replace("_", " "))
    event(world)


def _copy_of(world):
    return chosen(world.draw, [copy for copy in world.copies if copy.service])


def _push(world):
    world.push(_copy_of(world))


def _restart(world):
    world.restart(_copy_of(world))


def _go_back(world):
    """Start a service again from any earlier commit: a backup, or the newest commits are removed."""
    copy = _copy_of(world)
    if world.backups and world.draw.integers(3):
        folder, frames = chosen(world.draw, world.backups)
        world.restart(copy, folder, frames)
    else:
        world.remove_commits(copy)


def _copy(world):
    """Start a copy of the first service next to it."""
    first, second = world.copies
    world.stop(second)
    world.stop(first)
    world.restart(second, first.folder, first.frames)
    world.start(first)


def _follow(world, number=None):
    number = int(world.draw.integers(2)) if number is None else number
    world.catch_up(number) if world.draw.integers(3) else world.round(number)
    world.snapshots.append(world.store.snapshot()) if hasattr(world.store, "snapshot") else None


def _push_and_follow(world):
    _push(world)
    _follow(world)


def _follow_anew(world):
    number = int(world.draw.integers(2))
    world.follow_anew(number, _copy_of(world))
    world.catch_up(number)


def _interleave(world):
    """Push, and let something happen inside the transaction of a follower, or right before it."""
    number = int(world.draw.integers(2))
    _push(world)

    def between():
        for _ in range(int(world.draw.integers(1, 3))):
            if world.draw.integers(2):
                world.log.append(f"  follower {1 - number}")
                world.catch_up(1 - number)
            else:
                world.log.append("  inside:")
                _event(world, _ALWAYS)

    world.round(number, between)


def _push_during_a_fill(world):
    """Fill the store, and push between its tables."""
    world.store.empty() if hasattr(world.store, "empty") else None
    number, copy = int(world.draw.integers(2)), _copy_of(world)
    world.follow_anew(number, copy)
    client, fetch = world.followers[number].client, world.followers[number].client.table

    def fetch_and_change(name, rows):
        table = fetch(name, rows=rows)
        if name == "item":
            chosen(world.draw, [_push, _push, _restart, _go_back])(world)
        return table

    client.table = fetch_and_change
    world.round(number)
    del client.table


def _store_goes_back(world):
    store, draw = world.store, world.draw
    if hasattr(store, "restore") and draw.integers(3) and store.path_exists():
        _restore(world)
    elif world.snapshots:
        store.set_back(chosen(draw, world.snapshots))


def _restore(world):
    """Restore a version of a table by its own means, or several, and let it be compacted."""
    store, draw = world.store, world.draw
    for _ in range(int(draw.integers(1, 3))):
        options = {"by_time": True} if store.extra == "delta" and draw.integers(2) else {}
        if store.version() > store.first_version:
            store.restore(int(draw.integers(store.first_version, store.version())), **options)
        if draw.integers(3) == 0:
            store.compact()


def _empty(world):
    world.store.empty()


# What happens at any time, also inside the transaction of a follower, and what does not; as often as it is listed.
_ALWAYS = [_push, _follow, _follow, _push_and_follow, _push_and_follow, _store_goes_back, _store_goes_back, _go_back]
_ALWAYS += [_restart, _copy, _empty, _follow_anew]
_ALONE = [_push_and_follow, _push_and_follow, _store_goes_back, _interleave, _interleave, _interleave]
_ALONE += [_push_during_a_fill]
