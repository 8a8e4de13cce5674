"""Versions of a checkpoint: tags and steps that name a commit, ``DIR@VERSION``, and branches.

A tag is written in three steps: a hidden file that pins the commit's files, a check that the commit is still there, and
the name. A run that removes old commits removes their manifests first and then reads the tags. So either it sees the
hidden file and keeps what this pins, or the check fails and the tag is given up. This needs no lock, which stores of
objects lack, and a process that is killed leaves either the tag or none.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

from penstock.base.errors import CommitGoneError, StateError, UsageError, UsageTypeError, close_names, listed
from penstock.checkpoint.manifests import trusting
from penstock.checkpoint.store import TAG_NAME, Commit, DataFile, Folder, Tag
from penstock.model.version import Lineage, Parent, Version

_STEP = "[0-9]{1,18}"
_VERSION = re.compile(rf"(.+)@({TAG_NAME}|{_STEP})")
_AT_ONCE = 1 << 20
# The longest note of a tag, in characters.
MOST_NOTE = 1000

T = TypeVar("T")
AnyPath = str | os.PathLike[str]
# Bytes done, bytes of all files.
CopyProgress = Callable[[int, int], object]


class NamedCommit(NamedTuple):
    """A commit of a checkpoint. name : a tag or a step; None: the newest one"""

    folder: Folder
    name: str | None

    @classmethod
    def of(cls, place: AnyPath, version: str | int | None = None) -> NamedCommit:
        """Return the version that a place names: ``DIR``, or ``DIR@VERSION`` if there is no folder of that name.

        version : a tag or a step of the folder at ``place``
        Raises UsageError.
        """
        folder = Folder(place)
        if version is not None:
            return cls(folder, _checked_version(version))
        named = split(place)
        if named is None or folder.files.exists():
            return cls(folder, None)
        return cls(Folder(named[0]), named[1])

    def load(self) -> Commit:
        """Return the commit. Raises StateError, which names the nearest versions."""
        if self.name is None:
            return self.folder.must_load()
        if self.name[0].isdigit():
            return _of_step(self.folder, int(self.name))
        tag = self.folder.tag(self.name)
        if tag is None:
            raise no_tag(self.folder, self.name)
        return tag.commit

    def read(self, read: Callable[[Commit], T]) -> T:
        """Return ``read`` of the commit. Raises StateError; also if a run removes the commit while it is read."""
        return self.folder.read_last(read, self.load)


def split(place: AnyPath) -> tuple[str, str] | None:
    """Return both sides of the last ``@`` in the last component of a path or URI; None: it names no version."""
    text = os.fspath(place)
    if not isinstance(text, str):
        return None
    path, mark, options = text.partition("?") if "://" in text else (text, "", "")
    parent, slash, last = path.rstrip("/").rpartition("/")
    match = _VERSION.fullmatch(last)
    if match is None or parent.endswith(":/"):  # of a URI without a path, this is the host
        return None
    return f"{parent}{slash}{match[1]}{mark}{options}", match[2]


def commits(folder: Folder) -> Iterator[Commit]:
    """Yield the commits whose manifests can be read, newest first."""
    for number in reversed(folder.numbers()):
        with suppress(StateError):
            yield folder.load(number)


def all_commits(folder: Folder) -> list[tuple[Commit, list[str]]]:
    """Return the commits that are there, oldest first, also those that only tags keep, each with the names of its tags.

    Raises StateError if there is none, or a tag is damaged.
    """
    tags = folder.tags()
    by_digests = {tag.commit.digests: tag.commit for tag in tags}
    by_digests |= {commit.digests: commit for commit in commits(folder)}
    if not by_digests:
        folder.must_load()  # raises: there is none, or it is damaged
    names = {digests: [tag.name for tag in tags if tag.commit.digests == digests] for digests in by_digests}
    in_order = sorted(by_digests.values(), key=lambda commit: commit.number)
    return [(commit, names[commit.digests]) for commit in in_order]


def check_no_version(place: AnyPath) -> None:
    """Raise UsageError for a folder to write to that does not exist and whose name is a version of a checkpoint."""
    named = split(place)
    if named is None or Folder(place).files.exists() or not Folder(named[0]).numbers():
        return
    with suppress(StateError):
        NamedCommit.of(*named).load()
        raise UsageError(
            f"{Folder(place).path}: version {named[1]} of a checkpoint, and nothing is written to a version; "
            f"penstock branch {Folder(named[0]).path} NEWDIR --at {named[1]}, and run in NEWDIR"
        )


# ---- tags


def tag(path: AnyPath, name: str, step: int | None = None, *, note: str = "", move: bool = False) -> None:
    """Give a commit of a checkpoint a name, which keeps it (docs/versions.md).

    Parameters
    ----------
    path : str or path
        The checkpoint's folder or URI; a run may be committing to it.
    name : str
        A letter, then letters, digits, ``.``, ``_`` or ``-``, at most 64 characters.
    step : int or None
        The global step of the commit. None: the newest commit.
    note : str
        Any text, which ``penstock log`` shows.
    move : bool
        Replace a tag of this name.

    Raises
    ------
    StateError
        If there is no such commit; the message names the nearest ones.
    UsageError
        If the name is invalid, or a tag has it already.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.save("run1")
    >>> ps.tag("run1", "start")
    >>> engine.apply({"user": ([5], [[1.0, 2.0]])})
    True
    >>> engine.save("run1")
    >>> ps.Engine.restore("run1@start").global_step, ps.Engine.restore("run1").global_step
    (0, 1)
    """
    version = NamedCommit.of(path, step)
    make_tag(version.folder, version.load, name, note, move)


def make_tag(folder: Folder, load: Callable[[], Commit], name: str, note: str, move: bool) -> Tag:
    """Give the commit that ``load`` returns a name. Raises StateError and UsageError."""
    _check_name(name)
    if not isinstance(note, str) or len(note) > MOST_NOTE:
        raise UsageError(f"note: expected a text of at most {MOST_NOTE} characters")

    def write(commit: Commit) -> Tag:
        folder.checked(commit, sizes_only=True)
        new = Tag(name, commit, " ".join(note.split()), int(time.time()))
        unfinished = f".{name}.{secrets.token_hex(8)}.tagging"
        try:
            if not move and name in folder.tag_names():  # before anything is written
                raise FileExistsError
            folder.publish_tag(new, unfinished, partial(_check_is_there, folder, commit), move)
        except FileExistsError:
            before = folder.tag(name)
            step = "" if before is None else f" names step {before.commit.step}"
            raise UsageError(f"{folder.path}: tag '{name}'{step} already; give --move (move=True) to move it") from None
        return new

    return folder.read_last(write, load)


def delete_tag(folder: Folder, name: str) -> None:
    """Delete a tag, and remove what nothing else needs, unless a run has locked the folder: its next commit does it."""
    if name not in folder.tag_names():
        raise no_tag(folder, name)
    folder.remove_tag(name)
    if not folder.files.names_appear_whole:  # and without locks: a file without a manifest may be one of a run
        return
    with suppress(UsageError), folder.locked(wait_s=0):
        folder.tidy()


def no_tag(folder: Folder, name: str) -> StateError:
    """Return the error for a tag that does not exist."""
    names = folder.tag_names()
    if not names and not folder.numbers():
        folder.must_load()  # raises: there is no checkpoint
    near = close_names(name, names)
    hint = f"; did you mean '{near[0]}'?" if near else f"; there are: {listed(names)}" if names else "; it has no tags"
    return StateError(f"{folder.path}: no tag '{name}'{hint}")


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise UsageTypeError(f"tag: expected a name, got {name!r}")
    if not re.fullmatch(TAG_NAME, name):
        wanted = "expected a letter, then letters, digits, '.', '_' or '-', at most 64 characters"
        raise UsageError(f"tag {name[:80]!a}: {wanted}" + ("; a number is a step" if name.isdecimal() else ""))


def _checked_version(version: str | int) -> str:
    if type(version) not in (str, int):
        raise UsageTypeError(f"version: expected a tag or a step, got {version!r}")
    text = str(version)
    if not re.fullmatch(rf"{TAG_NAME}|{_STEP}", text):
        raise UsageError(f"version {text[:80]!a}: expected a tag or a step")
    return text


def _check_is_there(folder: Folder, commit: Commit) -> None:
    """Raise CommitGoneError if neither a manifest nor a tag keeps the files of a commit."""
    with suppress(StateError):
        if folder.load(commit.number).files == commit.files:
            return
    if not any(tag.commit.files == commit.files for tag in folder.tags()):
        raise CommitGoneError(f"{folder.path}: commit {commit.number} was removed before it had its tag")


def _of_step(folder: Folder, step: int) -> Commit:
    """Return the newest commit of a step, also one that only a tag keeps. Raises StateError."""
    labels: dict[int, str] = {}
    tagged = [(tag.commit, f"tag '{tag.name}'") for tag in folder.tags()]
    for commit, label in [*((commit, f"commit {commit.number}") for commit in commits(folder)), *tagged]:
        if commit.step == step:
            return commit
        labels.setdefault(commit.step, label)
    if not labels:
        return folder.must_load()  # raises: there is none, or it is damaged
    nearest = [max((other for other in labels if other < step), default=None)]
    nearest += [min((other for other in labels if other > step), default=None)]
    text = " and ".join(f"{other} ({labels[other]})" for other in nearest if other is not None)
    raise StateError(f"{folder.path}: no commit of step {step}; the nearest: {text}")


# ---- branches


def branch(version: NamedCommit, place: AnyPath, progress: CopyProgress = lambda done, total: None) -> Commit:
    """Start a new checkpoint with a commit of another one, under a new lineage, and return the commit.

    Files are shared where the file system has hard links, copied by an object store if both folders are in it, and else
    copied, and then verified. progress : called before and during each copy
    Raises UsageError if there is something at ``place``, StateError, and OSError; the new folder is empty then.
    """
    check_no_version(place)
    target = Folder(place)
    check_new(target)

    def write(commit: Commit) -> Commit:
        version.folder.checked(commit, sizes_only=True)
        with target.locked():
            check_new(target)  # another process may have locked it until now
            return _write_branch(version.folder, commit, target, progress)

    return version.read(write)


def check_new(target: Folder) -> None:
    """Raise UsageError if there is something in the folder of a new checkpoint."""
    if target.numbers():
        raise UsageError(f"{target.path}: holds a checkpoint; give a new or empty folder")
    target.check_place(resume=False)


def _write_branch(source: Folder, commit: Commit, target: Folder, progress: CopyProgress) -> Commit:
    """Write a branch into an empty folder; after an error it is empty again."""
    try:
        ends = list(accumulate(file.num_bytes for file in commit.files))
        for file, end in zip(commit.files, ends, strict=True):
            report = partial(_report, progress, end - file.num_bytes, commit.num_bytes)
            report(0)
            if not target.files.adopt(file.name, source.files):
                _copy(source, file, target, report)
            report(file.num_bytes)
        target.files.sync()
        branched = _under_new_lineage(source, commit)
        target.publish_commit(branched)
        return branched
    except BaseException as error:
        with suppress(OSError, StateError):
            target.clear()
        if isinstance(error, FileNotFoundError):
            source.checked(commit, sizes_only=True)  # raises, with the reason
        raise


def _report(progress: CopyProgress, before: int, total: int, num_bytes: int) -> None:
    progress(before + num_bytes, total)


def _under_new_lineage(source: Folder, commit: Commit) -> Commit:
    """Return the commit as that of a branch."""
    positions = commit.contents["positions"]
    with trusting(f"{source.path}, commit {commit.number}"):
        before = Lineage.from_state(positions)
        version = Version(str(commit.step)) if before is None else before.at(commit.step)
    parent = Parent(version, commit.digests[0])
    positions = {**positions, **Lineage.new(commit.step, parent).get_state()}
    # The files of deltas and bad rows are those of the other checkpoint.
    return Commit(
        commit.number, commit.files, {**commit.contents, "positions": positions, "deltas": None, "quarantine": None}
    )


def _copy(source: Folder, file: DataFile, target: Folder, progress: Callable[[int], object]) -> None:
    """Copy a data file, and verify its digest. Raises StateError and OSError."""
    if target.write_data(file.name, file.parent, _pieces(source, file, progress)) != file:
        raise StateError(
            f"{source.files.file(file.name)}: its digest does not fit: damaged or mixed up; branch another version"
        )


def _pieces(source: Folder, file: DataFile, progress: Callable[[int], object]) -> Iterator[bytes]:
    with source.files.open(file.name) as data:
        while piece := data.read(_AT_ONCE):
            yield piece
            progress(data.tell())
