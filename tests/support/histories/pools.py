"""Stores for many histories: the servers run once, and each history begins with an empty store."""

from contextlib import contextmanager

from stores import STORES_AND_FUNCTION, open_store

KINDS = tuple(STORES_AND_FUNCTION)


@contextmanager
def store_of(kind, folder):
    """Give a function that returns an empty store. folder : of a server"""
    if kind not in ("redis", "kafka"):
        yield STORES_AND_FUNCTION[kind]
        return
    with open_store(kind, folder, *(["--appendonly", "no"] if kind == "redis" else [])) as store:
        topics = iter(range(1 << 30))

        def next_store(_):
            store.empty() if kind == "redis" else store.use_topic(f"rows-{next(topics)}")
            return store

        yield next_store
