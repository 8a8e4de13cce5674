"""Commits by several processes: each writes the rows that it owns, and process 0 the one manifest, last.

A commit begins after the same frame everywhere. From then on every process copies and writes at its own pace; when its
data file is on disk it says so to process 0, whose manifest makes all of them one commit, and is told when that is so.
Rows are in the files by the ids of the whole table: any number of processes can take them up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penstock.checkpoint.engine_state import tables_to_save
from penstock.checkpoint.incremental import KEEP, Contents, Saver
from penstock.checkpoint.records import Record
from penstock.checkpoint.ring_buffer import Ring
from penstock.checkpoint.run_files import RunFiles
from penstock.checkpoint.run_session import Run
from penstock.checkpoint.session import CheckpointSession
from penstock.checkpoint.store import Commit, DataFile, Folder
from penstock.checkpoint.writer import CommitWriter
from penstock.core import EngineCore
from penstock.distributed.peers import Peers
from penstock.distributed.relay import described, raised
from penstock.errors import StateError
from penstock.tables.shares import Share


class SharedWriter(CommitWriter):
    """Writes this process's data file of a commit, and waits until all of them are one."""

    def __init__(
        self, folder: Folder, draft: Commit, keep: int, ring: Ring, peers: Peers, shares: Mapping[str, Share]
    ) -> None:
        self._peers, self._shares, self.part = peers, shares, part_of(peers)
        super().__init__(folder, draft, keep, ring)

    def _made(self) -> Commit:
        number, peers = self._draft.number, self._peers
        others = range(1, peers.count) if peers.rank == 0 else (0,)
        key = f"commit {number}" if peers.rank == 0 else f"file of commit {number}"
        try:
            written = self._written()
            if peers.rank:
                peers.post(0, key, {"file": asdict(written), "changed_step": self._draft.contents["changed_step"]})
                return self._told(number)
            found = [self._answer(other, f"file of commit {number}") for other in others]
            # The last step that touched a row touched one of somebody's.
            changed = max(of["changed_step"] for of in (self._draft.contents, *found))
            self._draft = replace(self._draft, contents={**self._draft.contents, "changed_step": changed})
            commit = self._named((written, *(DataFile(**of["file"]) for of in found)))
            self._folder.tidy(self._keep, commit)
        except BaseException as error:
            for other in others:
                peers.post(other, key, {"error": described(error)})
            raise
        for other in others:
            peers.post(other, key, {"files": [asdict(file) for file in commit.files]})
        return commit

    def _told(self, number: int) -> Commit:
        """The commit, once process 0 has made it."""
        files = self._answer(0, f"commit {number}")["files"]
        return Commit(number, tuple(DataFile(**file) for file in files), self._draft.contents)

    def _answer(self, of: int, key: str) -> Any:
        answer = self._peers.collect(of, key, lambda: self._cancelled)
        if "error" in answer:
            raise raised(answer["error"], of)
        return answer

    def _kept(self, record: Record) -> Record:
        """Numbers of rows here become ids."""
        share = self._shares[record.about["table"]] if "table" in record.about else None
        if share is None:
            return record
        if share.num_rows == 0:
            return Record("none", record.about)
        about = dict(record.about)
        if "first" in about:
            about["first"], about["step"] = int(share.ids(about["first"])), about["step"] * share.stride
        ids = {key: share.ids(array) for key, array in record.arrays.items() if key.rpartition(".")[2] == "ids"}
        return Record(record.kind, about, {**record.arrays, **ids})


class SharedSaver(Saver):
    """A Saver whose commits begin everywhere or nowhere."""

    def __init__(
        self,
        folder: Folder,
        core: EngineCore,
        describe: Callable[[], Contents],
        last: Commit | None,
        delta: bool,
        timed: Callable[[], AbstractContextManager[Any]],
        peers: Peers,
        shares: Mapping[str, Share],
    ) -> None:
        super().__init__(folder, tables_to_save(core), describe, last, delta, timed)
        self._peers, self._shares = peers, shares
        self._anybody_busy = False

    def open(self, keep: int = KEEP) -> None:
        if self._peers.rank == 0:
            super().open(keep)
        else:
            self._ring.touch()
            self._before_open = self.last
        self._peers.gather("the checkpoint's lock", None)
        finds = _found(self.folder)
        seen = self._peers.gather("the checkpoint's folder", finds)
        for rank, its in enumerate(seen):
            if its != seen[0]:
                raise StateError(
                    f"{self.folder.path}: process {rank} finds {its} there and process 0 {seen[0]}; the folder must be "
                    "one that all processes share"
                )
        self._keep, self._next_number = keep, max(self.folder.numbers(), default=0) + 1

    @property
    def may_begin(self) -> bool:
        """As all know it: nobody was writing when the last round began, and no commit has begun since."""
        return not self._anybody_busy

    def agree(self, anybody_busy: bool) -> None:
        """A round begins."""
        self._anybody_busy = anybody_busy

    def begin(self) -> None:
        super().begin()
        self._anybody_busy = True

    def _new_writer(self, draft: Commit) -> CommitWriter:
        return SharedWriter(self.folder, draft, self._keep, self._ring, self._peers, self._shares)


class SharedCheckpointSession(CheckpointSession):
    """The saving side of an engine that is one of several."""

    def __init__(
        self,
        core: EngineCore,
        peers: Peers,
        shares: Mapping[str, Share],
        timed: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(core, timed)
        self._peers, self._shares = peers, shares
        self.parts = tuple(part_of(peers, rank) for rank in range(peers.count))

    def is_busy(self) -> bool:
        return self._saver is not None and self._saver.is_busy

    def agree(self, anybody_busy: bool) -> None:
        if isinstance(self._saver, SharedSaver):
            self._saver.agree(anybody_busy)

    def _quarantine(self, path: Path | None) -> Path | None:
        """Bad rows are put aside by process 0, to whom they are sent."""
        return path if self._peers.rank == 0 else None

    def _any_new(self, files: RunFiles) -> bool:
        """Process 0 writes them, and all commit."""
        return any(self._peers.gather("files that no commit counts", super()._any_new(files)))

    def _may_commit(self, run: Run, error: BaseException) -> bool:
        """Only where everybody stops after this very frame."""
        return self._peers.all_raise(error) and super()._may_commit(run, error)

    def _make_saver(self, folder: Folder, last: Commit | None, delta: bool) -> Saver:
        return SharedSaver(folder, self._core, self._described, last, delta, self._timed, self._peers, self._shares)


def part_of(peers: Peers, rank: int | None = None) -> str:
    """What the data files of a process have in their names."""
    return f"-{peers.rank if rank is None else rank}of{peers.count}"


def _found(folder: Folder) -> str:
    """What a process sees of a folder that process 0 has locked."""
    if not (folder.path / ".lock").exists():
        return "nothing"
    numbers = folder.numbers()
    return f"commit {numbers[-1]}" if numbers else "no commit"
