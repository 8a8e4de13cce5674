"""The folder of a checkpoint: lists its commits, verifies them, and removes old ones.

``00000012.commit`` is the manifest of commit 12, written last: a data file without one was interrupted, and is
ignored. A manifest lists its data files, a base and the deltas after it, each with its digest, so a folder can still
be verified after it was copied or moved.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock.checkpoint.digests import DIGESTS, VERSION, digest_of
from penstock.checkpoint.records import Record, read_records
from penstock.errors import CommitGoneError, StateError, UsageError
from penstock.filesystem import atomic_files
from penstock.filesystem.descriptors import reserve
from penstock.validation import place

KEY = "penstock.checkpoint"
_READABLE = " and ".join(map(str, sorted(DIGESTS)))
_COMMIT = re.compile(r"(\d{8,})\.commit")
_PART = r"\d{8,}(-\d+of\d+)?\.(commit|base|delta)"
_OURS = re.compile(rf"{_PART}|\.{_PART}\.[\d-]+\.part|\.lock")
_AT_ONCE = 1 << 20
# How often a reader starts over with a newer commit: in each try, a run removed the commit that was read.
READ_TRIES = 5
# After a chain longer than this, or deltas larger than their base, the next commit is a new base.
MAX_DELTAS = 64

T = TypeVar("T")


@dataclass(frozen=True)
class DataFile:
    """A data file of a commit. parent : the digest of the previous file in the chain; None for a base"""

    name: str
    num_bytes: int
    digest: str
    parent: str | None

    @property
    def part(self) -> str:
        """Return which part of the rows the file contains: "-1of2", or "" for all rows."""
        return self.name.partition(".")[0].lstrip("0123456789")


@dataclass(frozen=True)
class Commit:
    """A commit. files : a base and its deltas, in the order they are read; contents : everything else, plain data.

    version : of the format; determines the digest of all its files
    If the shares of a job commit together, each has a separate base and deltas (``parts``), all in one manifest.
    """

    number: int
    files: tuple[DataFile, ...]
    contents: Mapping[str, Any]
    version: int = VERSION

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(file.part for file in self.files))

    @property
    def last_files(self) -> tuple[DataFile, ...]:
        """Return the last file of every part: these also contain the state that is not rows."""
        return tuple({file.part: file for file in self.files}.values())

    @property
    def digests(self) -> tuple[str, ...]:
        """Return the digests of the last files. They depend on all earlier files, so they identify the commit."""
        return tuple(file.digest for file in self.last_files)

    @property
    def may_grow(self) -> bool:
        """Whether a delta may follow: the chain is not too long, and has the current format version."""
        bases = [file for file in self.files if file.parent is None]
        deltas = [file for file in self.files if file.parent is not None]
        size, grown = (sum(file.num_bytes for file in files) for files in (bases, deltas))
        return self.version == VERSION and len(deltas) < MAX_DELTAS * len(bases) and grown <= size

    def encoded(self) -> bytes:
        """Return the manifest: JSON, and the digest of that on a separate line."""
        files = [asdict(file) for file in self.files]
        text = json.dumps({KEY: self.version, "number": self.number, "files": files, **self.contents}, indent=1)
        return f"{text}\n{digest_of(text.encode(), self.version)}\n".encode()


class Folder:
    """The folder of a checkpoint. Reading changes nothing; ``lock`` it before writing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = place("checkpoint", path)
        self._lock: int | None = None

    def numbers(self) -> list[int]:
        """Return the numbers of the commits, ascending."""
        return sorted(int(match[1]) for name in self._names() if (match := _COMMIT.fullmatch(name)))

    def is_empty(self) -> bool:
        """Return whether the folder does not exist, or contains no commit and only remains of an interrupted writer."""
        return not self.numbers() and all(_OURS.fullmatch(name) for name in self._names())

    def check_place(self, resume: bool) -> None:
        """Raise UsageError if a run may not commit to this folder."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path}: a checkpoint is a folder, this is a file")
        if not self.numbers() and not self.is_empty():
            raise UsageError(f"{self.path}: holds other files; give a new or empty folder for the checkpoint")
        if self.numbers() and not resume:
            raise UsageError(f"{self.path}: holds a checkpoint; resume it (--resume), or give another folder")

    def newest(self) -> Commit | None:
        """Return the newest commit; None if there is none. Raises StateError if its manifest is damaged."""
        numbers = self.numbers()
        return self.load(numbers[-1]) if numbers else None

    def read_last(self, read: Callable[[Commit], T]) -> T:
        """Return ``read`` of the newest commit. Raises StateError if there is none.

        Reading takes no lock: a run that commits here may remove the commit meanwhile. Then read the newest one again.
        """
        for _ in range(READ_TRIES):
            with contextlib.suppress(CommitGoneError):
                return read(self._must_load())
        raise StateError(
            f"{self.path}: {READ_TRIES} commits were removed while they were read: a run commits here faster than they "
            "can be read; wait until it has ended, or raise its keep="
        )

    def records(self, commit: Commit, files: Iterable[DataFile]) -> Iterator[Record]:
        """Yield the records of some files of a commit, one file after the other. Raises StateError."""
        for file in files:
            try:
                yield from read_records(self.path / file.name)
            except FileNotFoundError:
                raise self._missing(commit.number, self.path / file.name) from None

    def manifest(self, number: int) -> Path:
        """Return the path of a commit's manifest."""
        return self.path / f"{number:08}.commit"

    def load(self, number: int) -> Commit:
        """Return a commit, with the digest of its manifest and the chain of its files verified. Raises StateError."""
        path = self.manifest(number)
        try:
            text, _, last = reserve.open(path.read_bytes).removesuffix(b"\n").rpartition(b"\n")
            version = next((each for each in DIGESTS if digest_of(text, each).encode() == last), None)
            if version is None:
                raise self._damaged(path, number, "its digest does not fit: damaged or cut")
            found = json.loads(text)
            stated, named = found.pop(KEY), found.pop("number")
            if stated not in DIGESTS:
                raise StateError(f"{path}: version {stated}; this penstock reads versions {_READABLE}")
            if stated != version:
                raise self._damaged(path, number, f"version {stated} with the digest of version {version}: mixed up")
            files = tuple(DataFile(**file) for file in found.pop("files"))
        except FileNotFoundError:
            raise self._missing(number, path) from None
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(path, number, f"cannot be read ({error})") from error
        if named != number:
            raise self._damaged(path, number, f"is commit {named} under another name")
        before: dict[str, str] = {}
        for file in files:
            if file.parent != before.get(file.part):
                raise self._damaged(self.path / file.name, number, "is not what comes next in the chain")
            before[file.part] = file.digest
        return Commit(number, files, found, version)

    def checked(self, commit: Commit, files: Iterable[DataFile] | None = None) -> Commit:
        """Return the commit after a check that files of it exist and have their digests. Raises StateError.

        files : None: all of them
        """
        for file in commit.files if files is None else files:
            path, digest = self.path / file.name, DIGESTS[commit.version]()
            try:
                with open(path, "rb") as data:
                    size = os.fstat(data.fileno()).st_size
                    if size != file.num_bytes:
                        what = "cut" if size < file.num_bytes else "mixed up with another file"
                        raise self._damaged(path, commit.number, f"{size} bytes, expected {file.num_bytes}: {what}")
                    while piece := data.read(_AT_ONCE):
                        digest.update(piece)
            except FileNotFoundError:
                raise self._missing(commit.number, path) from None
            except OSError as error:
                raise self._damaged(path, commit.number, f"cannot be read ({error.strerror})") from error
            if digest.hexdigest() != file.digest:
                raise self._damaged(path, commit.number, "its digest does not fit: damaged or mixed up")
        return commit

    def name(self, commit: Commit) -> None:
        """Write the manifest of a commit, after all files that it lists are durable."""
        with atomic_files.appearing(self.manifest(commit.number)) as file:
            file.write(commit.encoded())

    def lock(self) -> None:
        """Lock the folder, created if missing, until ``unlock`` or the end of the process.

        Raises UsageError if another writer has locked it, OSError if it cannot be locked.
        """
        atomic_files.make_folders(self.path)
        file = atomic_files.open_lock(self.path / ".lock")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise UsageError(f"{self.path}: another run is writing checkpoints there") from None
        except OSError as error:  # a file system without locks, or a lock that is not a file
            os.close(file)
            error.filename = str(self.path / ".lock")
            raise
        self._lock = file

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def tidy(self, keep: int, newest: Commit | None = None) -> None:
        """Remove penstock's files, except those of the last ``keep`` commits. Do nothing if one of these is damaged.

        newest : the newest commit, if the caller has just written it
        """
        try:
            kept = [newest if newest and newest.number == n else self.load(n) for n in self.numbers()[-keep:]]
        except StateError:
            return
        needed = {file.name for commit in kept for file in commit.files}
        needed |= {f"{commit.number:08}.commit" for commit in kept} | {".lock"}
        gone = [name for name in self._names() if _OURS.fullmatch(name) and name not in needed]
        # Manifests first: a manifest without its files is a damaged commit, files without a manifest are ignored.
        for name in sorted(gone, key=lambda name: (not name.endswith(".commit"), name)):
            atomic_files.remove(self.path / name)

    def _must_load(self) -> Commit:
        """Return ``newest``. Raises StateError with the reason if there is none."""
        if not self.path.exists():
            raise StateError(f"{self.path}: no such checkpoint")
        if not self.path.is_dir():
            raise StateError(f"{self.path}: a checkpoint is a folder, this is a file")
        commit = self.newest()
        if commit is None:
            raise StateError(f"{self.path}: holds no commit (a file named 00000001.commit or the like)")
        return commit

    def _names(self) -> Sequence[str]:
        try:
            return reserve.open(lambda: os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StateError(f"{self.path}: cannot be read ({error.strerror})") from error

    def _missing(self, number: int, path: Path) -> StateError:
        """Return the error for a missing file. ``tidy`` removes a commit's manifest before its data files."""
        if self.manifest(number).exists():
            return self._damaged(path, number, "is missing")
        gone = f"commit {number} was removed while it was read"
        return CommitGoneError(f"{self.path}: {gone}: a run commits here and keeps only its last few; read it again")

    def _damaged(self, path: Path, number: int, problem: str) -> StateError:
        numbers = self.numbers()
        older = [n for n in numbers if n < number and not self._needs(n, path.name)]
        back = "; there is no older commit without it"
        if older:
            newer = ", ".join(self.manifest(n).name for n in numbers if n > older[-1])
            back = f", or to go back to commit {older[-1]}, remove {newer}"
        return StateError(f"{path}: {problem}; copy the folder anew from where it is whole{back}")

    def _needs(self, number: int, name: str) -> bool:
        """Return whether another commit needs a file too."""
        try:
            return name.encode() in self.manifest(number).read_bytes()
        except OSError:
            return True
