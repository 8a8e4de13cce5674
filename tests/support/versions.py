"""What the tests of versions share: a small engine, the state that each commit has, and stores that stop at a call."""

import numpy as np
import pyarrow.fs

import penstock as ps
from penstock.base.filesystem.file_stores import RemoteStore
from penstock.checkpoint.arrays import SavedTables
from penstock.checkpoint.store import Folder

ROWS, DIM = 60, 2
CONFIG = ps.EmbeddingConfig.from_tables(
    [ps.TableConfig(ROWS, DIM, name="user"), ps.TableConfig(7, 1, name="item")], ps.Adagrad(0.1)
)


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


def step(engine, seed):
    """Apply a frame of few rows; the same for the same seed."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, 5)
    engine.apply({"user": (ids, rng.standard_normal((5, DIM)).astype(np.float32))})


def saved(folder, steps, every=1, engine=None):
    """Commit after every so many of these steps. Return the engine, and its state hash by step."""
    engine, hashes = engine or ps.Engine(CONFIG), {}
    for number in steps:
        step(engine, number)
        if engine.global_step % every == 0:
            engine.save(folder)
            hashes[engine.global_step] = engine.state_hash()
    return engine, hashes


def removed_after(folder, num_commits=4):
    """Commit until a run has removed everything that it may."""
    saved(folder, range(100, 100 + num_commits), engine=ps.Engine.restore(folder))


def rewrite(engine):
    """Load a table anew: then every row has changed, and deltas outgrow their base."""
    parts = engine.retrieve_parameters("user")
    engine.load_parameters("user", parts.pop("parameters"), **parts)


def files(folder):
    """The contents of every file, except the lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def check_tags(folder):
    """Assert that no tag of a folder lacks a file: each has all of its bytes. Return step → digests by tag."""
    tags = Folder(folder).tags()
    for tag in tags:
        tables = SavedTables(f"{folder}@{tag.name}")
        assert tables.commit.digests == tag.commit.digests
        assert all(len(tables.parts(name)) for name in tables.tables)
    return {tag.name: (tag.commit.step, tag.commit.digests) for tag in tags}


class HookedStore(RemoteStore):
    """A store without locks, links and renames, on a path."""

    _hook = None
    _num_calls = 0

    def __init__(self, path):
        super().__init__(f"store://{path}", pyarrow.fs.LocalFileSystem(), str(path))

    @classmethod
    def hooked(cls, hook):
        """Call a function with its number before every request; None: none. Return the number of those so far."""
        num_calls, cls._num_calls, cls._hook = cls._num_calls, 0, hook
        return num_calls

    def _at(self, name):
        cls = type(self)
        cls._num_calls += 1
        if cls._hook is not None:
            cls._hook(cls._num_calls)
        return super()._at(name)

    def names(self):
        self._at("")
        return super().names()

    @classmethod
    def at(cls, place):
        """In place of ``store_at``."""
        return cls(str(place).removeprefix("store://"))
