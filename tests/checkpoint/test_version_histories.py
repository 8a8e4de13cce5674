"""Random histories of commits, tags, branches, rollbacks, cleaning, restarts and going back; any may be killed.

After each event every tag of every folder restores to the bits that its commit had. A failing history is printed with
its events; the seed repeats it.
"""

import errno
import os
import random
from contextlib import suppress

import pytest
from evidence import IS_EVIDENCE, IS_LONG, more_as_evidence
from faults.operations import Watched, failing
from versions import CONFIG, Killed, check_tags, rewrite, step

import penstock as ps
from penstock.base.filesystem import atomic_files
from penstock.checkpoint.rollbacks import roll_back_folder
from penstock.checkpoint.store import Folder
from penstock.checkpoint.versions import NamedCommit, branch, delete_tag

NAMES = ("a", "b", "c.d")
LENGTH = 24
HISTORIES = range(600 if IS_LONG else 40 if IS_EVIDENCE else 8)


class Line:
    """A folder, and the engine that commits to it. tags : name → the digests of the commit that it names"""

    def __init__(self, folder, engine=None):
        self.folder, self.engine, self.tags = folder, engine or ps.Engine(CONFIG), {}


class History:
    """Folders with what must be in them. hashes : digests of a commit → the state hash that it restores to"""

    def __init__(self, place, seed, monkeypatch):
        self.place, self.random, self.monkeypatch = place, random.Random(seed), monkeypatch
        self.lines, self.hashes, self.events = [Line(place / "0")], {}, []
        self.commit(self.lines[0])

    def run(self):
        events = [self.commit, self.commit, self.commit, self.tag, self.tag, self.move, self.delete]
        events += [self.clean, self.restart, self.go_back, self.travel, self.start_branch]
        events += [self.roll_back, self.roll_back_folder]
        for _ in range(LENGTH):
            line, event = self.random.choice(self.lines), self.random.choice(events)
            fault = self.random.choice([None, None, "kill", "kill", "full"])
            self.events.append((line.folder.name, event.__name__, fault))
            event(line, fault)
            self.check()

    def check(self):
        for line in self.lines:
            assert {name: digests for name, (_, digests) in check_tags(line.folder).items()} == line.tags
            assert ps.Engine.restore(line.folder).state_hash() == self.hashes[Folder(line.folder).newest().digests]

    def ends_early(self, fault, work):
        """Whether the fault came to pass at one of the file operations of ``work``."""
        number = self.random.randint(1, 12)

        def killed(n, name, args):
            if n >= number:
                raise Killed

        operations = {
            None: atomic_files.Operations,
            "kill": lambda: Watched(killed),
            "full": lambda: failing(number, errno.ENOSPC, also_after=True),
        }[fault]()
        with self.monkeypatch.context() as patch:
            patch.setattr(atomic_files, "operations", operations)
            try:
                work()
            except (Killed, OSError):
                return True
        return False

    # ---- events

    def commit(self, line, fault=None):
        step(line.engine, self.random.getrandbits(32))
        if self.random.random() < 0.4:
            rewrite(line.engine)
        state = line.engine.state_hash()
        if self.ends_early(fault, lambda: line.engine.save(line.folder)):
            self.hashes.setdefault(Folder(line.folder).newest().digests, state)  # it may be there nevertheless
            self.restart(line)
        self.hashes.setdefault(Folder(line.folder).newest().digests, line.engine.state_hash())

    def restart(self, line, fault=None):
        line.engine = ps.Engine.restore(line.folder)

    def clean(self, line, fault=None):
        folder = Folder(line.folder)

        def clean():
            folder.lock()
            folder.tidy(self.random.randint(1, 2))

        self.ends_early(fault, clean)
        folder.unlock()

    def go_back(self, line, fault=None):
        *older, newest = Folder(line.folder).numbers()
        if older:
            (line.folder / f"{newest:08}.commit").unlink()
            self.restart(line)

    def version(self, line):
        """A tag or the step of a commit, and the commit that it names."""
        names = [*line.tags, *(Folder(line.folder).load(number).step for number in Folder(line.folder).numbers())]
        name = self.random.choice(names)
        return name, NamedCommit.of(line.folder, name).load()

    def roll_back(self, line, fault=None):
        """Roll the engine back, train on in half of the cases, and commit."""
        name, commit = self.version(line)
        if line.engine.session.last is None:  # nothing of it was saved
            return
        expected = line.engine.global_step + 1
        assert line.engine.rollback(name) == expected
        assert line.engine.core.tables.hash(commit.step) == self.hashes[commit.digests]
        if self.random.random() < 0.5:
            step(line.engine, self.random.getrandbits(32))
        state = line.engine.state_hash()
        if self.ends_early(fault, lambda: line.engine.save(line.folder)):
            self.hashes.setdefault(Folder(line.folder).newest().digests, state)
            self.restart(line)
        self.hashes.setdefault(Folder(line.folder).newest().digests, line.engine.state_hash())

    def roll_back_folder(self, line, fault=None):
        """Roll the folder back without its engine, which restarts there."""
        name, commit = self.version(line)
        before = Folder(line.folder).newest()
        ended = self.ends_early(fault, lambda: roll_back_folder(line.folder, name))
        after = Folder(line.folder).newest()
        assert ended or after.number > before.number
        if after.number > before.number:
            assert after.step == before.step + 1
            self.restart(line)
            assert line.engine.core.tables.hash(commit.step) == self.hashes[commit.digests]
            state = line.engine.state_hash()
            assert self.hashes.setdefault(after.digests, state) == state
        Folder(line.folder).unlock()

    def tag(self, line, fault=None, move=False):
        folder, name = Folder(line.folder), self.random.choice(NAMES)
        commit = folder.load(self.random.choice(folder.numbers()))
        newest_of_step = NamedCommit.of(line.folder, commit.step).load()
        with suppress(ps.UsageError):  # the name is taken
            ended = self.ends_early(fault, lambda: ps.tag(line.folder, name, commit.step, move=move))
            now = folder.tag(name)
            if ended:
                assert now is None or now.commit.digests in (line.tags.get(name), newest_of_step.digests)
            else:
                assert now is not None
                assert now.commit.digests == newest_of_step.digests
            line.tags |= {} if now is None else {name: now.commit.digests}

    def move(self, line, fault=None):
        self.tag(line, fault, move=True)

    def delete(self, line, fault=None):
        if line.tags:
            name = self.random.choice(sorted(line.tags))
            self.ends_early(fault, lambda: delete_tag(Folder(line.folder), name))
            if name not in Folder(line.folder).tag_names():
                del line.tags[name]

    def travel(self, line, fault=None):
        for name, digests in line.tags.items():
            assert ps.Engine.restore(f"{line.folder}@{name}").state_hash() == self.hashes[digests]

    def start_branch(self, line, fault=None):
        new, version = self.place / str(len(self.lines)), self.random.choice([None, *sorted(line.tags)])
        self.ends_early(fault, lambda: branch(NamedCommit.of(line.folder, version), new))
        if Folder(new).numbers():
            self.lines.append(Line(new, ps.Engine.restore(new)))
            digests = Folder(line.folder).newest().digests if version is None else line.tags[version]
            assert self.lines[-1].engine.state_hash() == self.hashes[digests]


@pytest.mark.sampled("0", "2", "5")
@more_as_evidence
@pytest.mark.parametrize("seed", HISTORIES)
def test_no_history_leaves_a_tag_whose_files_are_gone(seed, tmp_path, monkeypatch):
    history = History(tmp_path, seed, monkeypatch)
    try:
        history.run()
    except BaseException:
        print(*history.events, sep="\n")
        raise
    for line in history.lines:
        for name in [*line.tags]:
            history.travel(line)
            delete_tag(Folder(line.folder), name)
            del line.tags[name]
        for left in line.folder.glob(".*.tagging"):  # of killed processes, which pin their files for a day
            os.utime(left, (0, 0))
        history.commit(line)
        folder = Folder(line.folder)
        needed = {file.name for number in folder.numbers() for file in folder.load(number).files}
        assert {path.name for path in line.folder.iterdir() if path.suffix in (".base", ".delta")} == needed
