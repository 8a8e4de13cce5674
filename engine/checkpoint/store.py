"""The folder of a checkpoint: lists its commits, verifies them, and removes old ones.

``00000012.commit`` is the manifest of commit 12, written last: a data file without one was interrupted, and is
ignored. A manifest lists its data files, a base and the deltas after it, each with its digest, so a folder can still
be verified after it was copied or moved. At a URI whose files may appear before they are whole, the newest commit
is the one with the highest number whose manifest has its digest; no commit is ever written over another.

``good.tag`` is a tag: the manifest of the commit that it names, and a note. So a tagged commit needs no other manifest,
and the numbers of commits are those of the newest ones alone. ``tidy`` keeps the data files that tags list; versions.py
says how a tag is written so that no file of it is removed meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import penstock.base.forks as forks
from penstock.base.errors import CommitGoneError, StateError, UsageError, UsageTypeError, unreleased
from penstock.base.filesystem.file_stores import store_at
from penstock.base.filesystem.state_files import parsed_json
from penstock.checkpoint.manifests import (
    FORMAT,
    KEY,
    PART,
    UNRELEASED_KEY,
    check_manifest,
    digest_of,
    new_digest,
)
from penstock.checkpoint.records import Record, read_records
from penstock.model.version import LINEAGE_FIELDS

# In the contents of a commit with the state of the one before.
REPEATS = "repeats"
_COMMIT = re.compile(r"([0-9]{8,})\.commit")
_OUR_NUMBER = re.compile(rf"(?=([0-9]+)){PART}")
_OURS = re.compile(rf"{PART}|\.{PART}\.[0-9-]+\.part|\.lock")
# A number in place of the name of a tag is a step.
TAG_NAME = r"[A-Za-z][A-Za-z0-9._-]{0,63}"
_TAG = re.compile(rf"({TAG_NAME})\.tag")
# A tag that is being written; a killed process leaves it, and it pins its files until it is so old.
UNFINISHED_TAG = re.compile(rf"\.{TAG_NAME}\.[0-9a-f]{{16}}\.tagging")
ABANDONED_S = 24 * 3600
# How long to wait for the lock of the folder, and the pause between two attempts.
LOCK_WAIT_S, LOCK_PAUSE_S = 1.0, 0.01
# Names that the system surely lists in one piece.
LISTED_AT_ONCE = 256
# How often a reader starts over with a newer commit: in each try, a run removed the commit that was read.
READ_TRIES = 5
# Contains an unfinished replay in passes (shares/pass_folder.py).
PASSES = ".passes"
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

    If the shares of a job commit together, each has a separate base and deltas (``parts``), all in one manifest.
    """

    number: int
    files: tuple[DataFile, ...]
    contents: Mapping[str, Any]

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
    def repeats(self) -> bool:
        """Whether the commit before has the same state: no row changed, and no frame was applied. Its last file has no
        row, so the next delta follows the file before."""
        return bool(self.contents.get(REPEATS))

    @property
    def chain(self) -> tuple[DataFile, ...]:
        """Return the files that the next delta follows."""
        return self.files[:-1] if self.repeats else self.files

    @property
    def may_grow(self) -> bool:
        """Whether a delta with rows may follow: the chain is not too long."""
        bases = [file for file in self.chain if file.parent is None]
        deltas = [file for file in self.chain if file.parent is not None]
        size, grown = (sum(file.num_bytes for file in files) for files in (bases, deltas))
        return len(deltas) < MAX_DELTAS * len(bases) and grown <= size

    def has_state_of(self, other: Commit) -> bool:
        """Return whether the contents of both are the same, except for the epochs of their lineage."""
        return _state(self.contents) == _state(other.contents)

    @property
    def step(self) -> int:
        return int(self.contents["global_step"])

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def encoded(self, tag: Mapping[str, Any] | None = None) -> bytes:
        """Return the manifest: JSON, and the digest of that on a separate line. tag : what a tag adds to it"""
        files = [asdict(file) for file in self.files]
        fields = {KEY: FORMAT, "number": self.number, "files": files, **self.contents}
        text = json.dumps(fields if tag is None else {**fields, "tag": tag}, indent=1)
        return f"{text}\n{digest_of(text.encode())}\n".encode()


@dataclass(frozen=True)
class Tag:
    """A name for a commit. tagged_s : when it was given, in seconds since the epoch"""

    name: str
    commit: Commit
    note: str
    tagged_s: int


class Folder:
    """The folder of a checkpoint. Reading changes nothing; ``lock`` it before writing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.files = store_at(path)
        except TypeError:
            raise UsageTypeError(f"checkpoint: expected a path, got {path!r}") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"checkpoint: no store that pyarrow.fs opens: {str(error).splitlines()[0]}") from error
        self.path = self.files.place
        self._lock: int | None = None

    def numbers(self) -> list[int]:
        """Return the numbers of the commits, ascending."""
        return sorted(int(match[1]) for name in self._names() if (match := _COMMIT.fullmatch(name)))

    def next_number(self) -> int:
        """Return the number of the next commit: no commit and no file that a tag may pin has it or a higher one."""
        # Newer manifests may have been removed, to go back, while tags keep their data files.
        return max((int(match[1]) for name in self._names() if (match := _OUR_NUMBER.fullmatch(name))), default=0) + 1

    def check_place(self, resume: bool) -> None:
        """Raise UsageError if a run may not commit to this folder."""
        numbers = self.numbers()
        if self.files.exists() and not self.files.is_folder():
            raise UsageError(f"{self.path}: a checkpoint is a folder, this is a file")
        # An interrupted writer may have left files that no commit lists.
        if not numbers and not all(_OURS.fullmatch(name) for name in self._names()):
            raise UsageError(f"{self.path}: holds other files; give a new or empty folder for the checkpoint")
        if numbers and not resume:
            raise UsageError(f"{self.path}: holds a checkpoint; resume it (--resume), or give another folder")

    def newest(self) -> Commit | None:
        """Return the newest commit; None if there is none. Raises StateError if its manifest is damaged."""
        numbers = self.numbers()
        for number in numbers[:0:-1]:
            try:
                return self.load(number)
            except StateError:
                if self.files.names_appear_whole:
                    raise
        return self.load(numbers[0]) if numbers else None

    def read_last(self, read: Callable[[Commit], T], load: Callable[[], Commit]) -> T:
        """Return ``read`` of the commit that ``load`` returns. Raises StateError if there is none.

        Reading takes no lock: a run that commits here may remove the commit meanwhile. Then load and read again.
        """
        for _ in range(READ_TRIES):
            with contextlib.suppress(CommitGoneError):
                return read(load())
        raise StateError(
            f"{self.path}: {READ_TRIES} commits were removed while they were read: a run commits here faster than they "
            "can be read; wait until it has ended, or raise its keep="
        )

    def records(self, commit: Commit, files: Iterable[DataFile], only_shapes: bool = False) -> Iterator[Record]:
        """Yield the records of some files of a commit, one file after the other. Raises StateError.

        only_shapes : read no contents of arrays, which are zeros
        """
        for file in files:
            try:
                with self.files.open(file.name, ahead=not only_shapes) as data:
                    yield from read_records(data, self.files.file(file.name), only_shapes)
            except FileNotFoundError:
                raise self._missing(commit.number, file.name) from None

    def written_s(self, commit: Commit) -> float | None:
        """Return when a commit became complete, in seconds since the epoch; None if it is gone."""
        return self.files.written_s(_manifest(commit.number))

    def load(self, number: int) -> Commit:
        """Return a commit, with the digest of its manifest and the chain of its files verified. Raises StateError."""
        name = _manifest(number)
        try:
            commit, _ = self._read_manifest(name, number)
        except FileNotFoundError:
            raise self._missing(number, name) from None
        if commit.number != number:
            raise self._damaged(name, number, f"is commit {commit.number} under another name")
        return commit

    def tag(self, name: str) -> Tag | None:
        """Return a tag; None if there is none of the name. Raises StateError if its file is damaged."""
        file = f"{name}.tag"
        try:
            commit, fields = self._read_manifest(file, None)
        except FileNotFoundError:
            return None
        if fields.get("name") != name:
            raise self._damaged(file, None, f"is tag '{fields.get('name')}' under another name")
        return Tag(name, commit, fields["note"], fields["tagged_s"])

    def tag_names(self) -> list[str]:
        return sorted(match[1] for name in self._names() if (match := _TAG.fullmatch(name)))

    def tags(self) -> list[Tag]:
        """Return the tags by name. Raises StateError if one is damaged."""
        return [tag for name in self.tag_names() if (tag := self.tag(name)) is not None]

    def publish_tag(self, tag: Tag, unfinished: str, check: Callable[[], object], replace: bool) -> None:
        """Write a tag as ``unfinished``, which pins its files, and give it its name if ``check`` does not raise.

        Raises FileExistsError if there is a tag of the name, unless ``replace``.
        """
        fields = {"name": tag.name, "note": tag.note, "tagged_s": tag.tagged_s}
        self.files.publish(f"{tag.name}.tag", unfinished, tag.commit.encoded(fields), check, replace)

    def remove_tag(self, name: str) -> None:
        self.files.remove(f"{name}.tag")

    def _read_manifest(self, name: str, number: int | None) -> tuple[Commit, dict[str, Any]]:
        """Return the commit and the tag in a file, whose digest and chain of files are verified.

        number : of the commit that the file should contain; None: the file is a tag
        Raises StateError, and FileNotFoundError.
        """
        try:
            text, _, last = self._read(name).removesuffix(b"\n").rpartition(b"\n")
            if digest_of(text).encode() != last:
                raise self._damaged(name, number, "its digest does not fit: damaged or cut")
            manifest = parsed_json(text)
            if isinstance(manifest, dict) and UNRELEASED_KEY in manifest:
                raise unreleased(self.files.file(name), "replay the sources into a new checkpoint")
            number_of_format = manifest.get(KEY) if isinstance(manifest, dict) else None
            if type(number_of_format) is int and number_of_format != FORMAT:
                raise StateError(f"{self.files.file(name)}: format {number_of_format}; this penstock reads {FORMAT}")
            check_manifest(manifest)
            del manifest[KEY]
            commit_number, tag = manifest.pop("number"), manifest.pop("tag", {})
            files = tuple(DataFile(**file) for file in manifest.pop("files"))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._damaged(name, number, f"cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise self._damaged(name, number, f"its contents do not add up ({error})") from error
        before: dict[str, str] = {}
        for file in files:
            if file.parent != before.get(file.part):
                raise self._damaged(file.name, number, "is not what comes next in the chain")
            before[file.part] = file.digest
        return Commit(commit_number, files, manifest), tag

    def checked(self, commit: Commit, files: Iterable[DataFile] | None = None, sizes_only: bool = False) -> Commit:
        """Return the commit after a check that files of it exist and have their digests. Raises StateError.

        files : None: all of them; sizes_only : check only that they exist and have their sizes
        """
        for file in commit.files if files is None else files:
            try:
                size = self.files.size(file.name)
                if size != file.num_bytes:
                    damage = "cut" if size < file.num_bytes else "mixed up with another file"
                    raise self._damaged(file.name, commit.number, f"{size} bytes, expected {file.num_bytes}: {damage}")
                if sizes_only:
                    continue
                with self.files.open(file.name) as data:
                    digest = hashlib.file_digest(data, new_digest)
            except FileNotFoundError:
                raise self._missing(commit.number, file.name) from None
            except OSError as error:
                raise self._damaged(file.name, commit.number, f"cannot be read ({error.strerror})") from error
            if digest.hexdigest() != file.digest:
                raise self._damaged(file.name, commit.number, "its digest does not fit: damaged or mixed up")
        return commit

    def has_files(self, commit: Commit) -> bool:
        """Return whether all files of a commit are there, with their sizes."""
        try:
            self.checked(commit, sizes_only=True)
        except StateError:
            return False
        return True

    def write_data(self, name: str, parent: str | None, pieces: Iterable[bytes | memoryview]) -> DataFile:
        """Write a data file, which is durable on return. parent : the digest of the one before it in the chain"""
        digest, num_bytes = new_digest(), 0
        with self.files.publishing(name) as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
                num_bytes += len(piece)
        return DataFile(name, num_bytes, digest.hexdigest(), parent)

    def publish_commit(self, commit: Commit) -> None:
        """Write the manifest of a commit, after all files that it lists are durable: from then on it is there."""
        with self.files.publishing(_manifest(commit.number)) as file:
            file.write(commit.encoded())

    def lock(self, wait_s: float = LOCK_WAIT_S) -> None:
        """Lock the folder, created if missing, until ``unlock`` or the end of the process.

        wait_s : how long to wait for another process, such as ``penstock tag``, which locks it for a moment
        Raises UsageError if another writer has locked it, OSError if it cannot be locked. A store without locks relies
        on the caller: one writer at a time.
        """
        until_s = time.monotonic() + wait_s
        while True:
            try:
                self._lock = self.files.lock()
                return
            except BlockingIOError as error:
                if time.monotonic() >= until_s:
                    problem = f"another run is writing checkpoints there ({error.strerror})"
                    raise UsageError(f"{self.path}: {problem}") from None
            time.sleep(LOCK_PAUSE_S)

    def unlock(self) -> None:
        if self._lock is not None:
            forks.close(self._lock)
            self._lock = None

    def check_unlocked(self) -> None:
        """Raise UsageError if another writer has locked the folder: before work that would be in vain."""
        with contextlib.suppress(OSError):  # which the writer reports once it locks the folder
            if self.files.is_folder():
                with self.locked():
                    pass

    @contextlib.contextmanager
    def locked(self, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
        """Hold the folder's lock in the block. Raises as ``lock``."""
        self.lock(wait_s)
        try:
            yield
        finally:
            self.unlock()

    def tidy(self, keep: int | None = None, newest: Commit | None = None) -> None:
        """Remove penstock's files, except those of tags and of the last ``keep`` commits. Do nothing if names or a
        commit cannot be read.

        A commit that repeats the one before is kept only as the newest, and does not count: starts that are followed by
        no frame remove no earlier state.
        keep : None: all commits; newest : the newest commit, if the caller has just written it
        """
        kept: list[Commit] = []
        try:
            numbers = self.numbers()
            for number in reversed(numbers):
                commit = newest if newest and newest.number == number else self.load(number)
                if not kept or not commit.repeats:
                    kept.append(commit)
                if keep is not None and len(kept) == keep + kept[0].repeats:
                    break
        except StateError:
            return
        manifests = {_manifest(commit.number) for commit in kept}
        # Manifests first: a manifest without its files is a damaged commit, files without a manifest are ignored. Tags
        # after them: a tag of a commit whose manifest is gone is given up, so what is pinned now is all that ever is.
        for name in map(_manifest, numbers):
            if name not in manifests:
                self.files.remove(name)
        try:
            names, pinned = self._pinned()
        except StateError:
            return
        needed = {file.name for commit in kept for file in commit.files} | manifests | pinned | {".lock"}
        for name in names:
            if _OURS.fullmatch(name) and name not in needed:
                self.files.remove(name)

    def clear(self) -> None:
        """Remove all commits, manifests first, and what an interrupted writer left."""
        for name in sorted(self._names(), key=lambda name: not name.endswith(".commit")):
            if _OURS.fullmatch(name) and name != ".lock":
                self.files.remove(name)

    def _pinned(self) -> tuple[Sequence[str], set[str]]:
        """Return the names in the folder, and those of the data files that tags pin, also tags that are being written.

        Raises StateError if a tag is damaged: what it pins is unknown.
        """
        for _ in range(READ_TRIES):
            names, pinned = self._names(), set[str]()
            tags = _tag_files(names)
            try:
                for name in tags:
                    if _TAG.fullmatch(name):
                        pinned |= {file.name for file in self._read_manifest(name, None)[0].files}
                    else:
                        pinned |= self._pinned_by_unfinished(name)
            except FileNotFoundError:  # it has got its name since, or was deleted
                continue
            # A listing in several pieces may contain neither name of a tag that gets its name meanwhile.
            if (not tags and len(names) <= LISTED_AT_ONCE) or tags == _tag_files(self._names()):
                return names, pinned
        raise StateError(f"{self.path}: its tags change faster than they can be read")

    def _pinned_by_unfinished(self, name: str) -> set[str]:
        """Return the data files that a tag without its name pins. Remove it if the process that wrote it was killed."""
        written_s = self.files.written_s(name)
        if written_s is not None and time.time() - written_s > ABANDONED_S:
            self.files.remove(name)
            return set()
        try:
            return {file.name for file in self._read_manifest(name, None)[0].files}
        except StateError:  # half written: its writer has yet to check that the commit is there
            return set()

    def must_load(self) -> Commit:
        """Return ``newest``. Raises StateError with the reason if there is none."""
        commit = self.newest()
        if commit is not None:
            return commit
        if not self.files.exists():
            raise StateError(f"{self.path}: no such checkpoint")
        if not self.files.is_folder():
            raise StateError(f"{self.path}: a checkpoint is a folder, this is a file")
        raise StateError(f"{self.path}: holds no commit (a file named 00000001.commit or the like)")

    def _read(self, name: str) -> bytes:
        with self.files.open(name) as file:
            return file.read()

    def _names(self) -> Sequence[str]:
        try:
            return [name for name in self.files.names() if name != PASSES]
        except OSError as error:
            raise StateError(f"{self.path}: cannot be read ({error.strerror})") from error

    def _missing(self, number: int, name: str) -> StateError:
        """Return the error for a missing file. ``tidy`` removes a commit's manifest before its data files."""
        if self.files.written_s(_manifest(number)) is not None or any(
            tag.commit.number == number for tag in self.tags()
        ):
            return self._damaged(name, number, "is missing")
        gone = f"commit {number} was removed while it was read"
        return CommitGoneError(f"{self.path}: {gone}: a run commits here and keeps only its last few; read it again")

    def _damaged(self, name: str, number: int | None, problem: str) -> StateError:
        """Return the error for a damaged file. number : of its commit; None: of a tag"""
        numbers = self.numbers()
        if number is None or number not in numbers:
            return StateError(f"{self.files.file(name)}: {problem}; copy it anew, or delete the tag that needs it")
        older = [n for n in numbers if n < number and not self._needs(n, name)]
        back = "; there is no older commit without it"
        if older:
            newer = ", ".join(_manifest(n) for n in numbers if n > older[-1])
            back = f", or to go back to commit {older[-1]}, remove {newer}"
        return StateError(f"{self.files.file(name)}: {problem}; copy the folder anew from where it is whole{back}")

    def _needs(self, number: int, name: str) -> bool:
        """Return whether another commit needs a file too."""
        try:
            return name.encode() in self._read(_manifest(number))
        except OSError:
            return True


def _state(contents: Mapping[str, Any]) -> str:
    """Return the contents of a commit as text, without what tells commits of the same state apart."""
    positions = {name: value for name, value in contents["positions"].items() if name not in LINEAGE_FIELDS}
    state = {name: value for name, value in contents.items() if name != REPEATS}
    return json.dumps({**state, "positions": positions}, sort_keys=True)


def _tag_files(names: Iterable[str]) -> set[str]:
    """Return those names that are of tags, also of tags that are being written."""
    return {name for name in names if _TAG.fullmatch(name) or UNFINISHED_TAG.fullmatch(name)}


def _manifest(number: int) -> str:
    """Return the name of a commit's manifest."""
    return f"{number:08}.commit"
