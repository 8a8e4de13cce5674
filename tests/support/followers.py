"""Followers in the process of a test: one round at a time, and paused right before they write."""

from contextlib import contextmanager

from services import client_of

from penstock.io.targets.follower import Follower


@contextmanager
def follower_of(service, store):
    """A follower that is driven by its rounds."""
    target = store.opened_target()
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
