"""The files of one folder, on a path or at a URI of pyarrow.fs: listed, read, written whole, removed, locked.

On a path, a file appears complete and durable by a rename. At a URI it appears as its store promises: on S3 and Google
Cloud Storage when all of it was uploaded, on HDFS while it is written. So what is in a file must prove it whole.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.base.filesystem import atomic_files
from penstock.base.filesystem.read_ahead import Blocks
from penstock.base.filesystem.state_files import open_regular

# What a reader of a store's file copies at once, and requests of one that it does not read in order.
_AT_ONCE, _HEADER_BYTES = 1 << 20, 1 << 16


class LocalStore:
    """The files of a folder on a path, by name. All methods raise OSError, which names the file.

    place : for messages
    address : opens the same folder again, on any machine that reaches it
    names_appear_whole : whether a file with a name is always complete
    """

    names_appear_whole = True

    def __init__(self, path: Path) -> None:
        self.place, self.address, self._path = path, os.path.abspath(path), path

    def file(self, name: str) -> Path:
        """Return a file's place, for messages."""
        return self._path / name

    def exists(self) -> bool:
        """Return whether there is something of the folder's name."""
        return self._path.exists()

    def is_folder(self) -> bool:
        return self._path.is_dir()

    def identity(self) -> str:
        """Return a text that two objects for one folder have in common."""
        return str(self._path.resolve())

    def names(self) -> Sequence[str]:
        """Return the names of the files; none if there is no such folder."""
        try:
            return os.listdir(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def open(self, name: str, ahead: bool = True) -> io.BufferedReader:
        """Open a file. ahead : it is read from its beginning to its end"""
        return open_regular(self._path / name)

    def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def written_s(self, name: str) -> float | None:
        """Return when a file was written, in seconds since the epoch; None if there is none."""
        with suppress(FileNotFoundError):
            return (self._path / name).stat().st_mtime
        return None

    def publishing(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Write a file that gets its name when the block succeeds."""
        return atomic_files.publishing(self._path / name)

    def publish(self, name: str, unfinished: str, data: bytes, check: Callable[[], object], replace: bool) -> None:
        """Write a file under the name ``unfinished``; then, if ``check`` does not raise, under its name only.

        Raises FileExistsError if there is a file of the name, unless ``replace``. After an error there is no new file.
        """
        file = atomic_files.File(self._path / name, self._path / unfinished)
        with file.all_or_nothing():
            file.write(data)
            file.complete()
            check()
            # A link, unlike a rename, replaces no file of another process.
            if not replace and atomic_files.link_if_possible(file.part, file.path):
                atomic_files.discard(file.part)
            elif not replace and file.path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(file.path))
            else:
                file.publish()
        atomic_files.sync_folder(self._path)

    def adopt(self, name: str, other: FileStore) -> bool:
        """Give this folder a complete file of another one, without its bytes passing through this machine.

        Return False if that is impossible: between these folders it takes a copy. Replaces a file of the name.
        """
        if not isinstance(other, LocalStore):
            return False
        atomic_files.remove(self._path / name)
        return atomic_files.link_if_possible(Path(other.file(name)), self._path / name)

    def sync(self) -> None:
        """Make the names of adopted files durable."""
        atomic_files.sync_folder(self._path)

    def remove(self, name: str) -> None:
        """Remove a file, or see that it is gone."""
        atomic_files.remove(self._path / name)

    def lock(self) -> int | None:
        """Create the folder if it is missing, and lock it until ``forks.close`` of the result.

        Raises BlockingIOError if another process has locked it. A store without locks returns None.
        """
        atomic_files.make_folders(self._path)
        return atomic_files.lock(self._path / ".lock")


class RemoteStore:
    """The files of a folder at a URI, with the methods of ``LocalStore``.

    A store of objects has no folders: it exists once it has a file.

    filesystem, path : as pyarrow.fs has them
    """

    names_appear_whole = False

    def __init__(self, uri: str, filesystem: Any, path: str) -> None:
        self.place, self.address, self._fs, self._path = place_of(uri), uri, filesystem, path.rstrip("/")

    def file(self, name: str) -> str:
        return f"{self.place}/{name}" if name else str(self.place)

    def exists(self) -> bool:
        return str(self._info("").type.name) != "NotFound"

    def is_folder(self) -> bool:
        return str(self._info("").type.name) == "Directory"

    def identity(self) -> str:
        return f"{self._fs.type_name}:{self._path}"

    def names(self) -> Sequence[str]:
        from pyarrow.fs import FileSelector

        with self._naming(""):
            infos = self._fs.get_file_info(FileSelector(self._path, allow_not_found=True))
            return [info.base_name for info in infos if info.type.name == "File"]

    def open(self, name: str, ahead: bool = True) -> io.BufferedReader:
        with self._naming(name):
            file = self._fs.open_input_file(self._at(name))
            if ahead:
                file = Blocks(file)
                file.read_in_order()
        return io.BufferedReader(file, _AT_ONCE if ahead else _HEADER_BYTES)

    def size(self, name: str) -> int:
        info = self._info(name)
        if info.size is None:
            raise FileNotFoundError(2, "No such file", self.file(name))
        return int(info.size)

    def written_s(self, name: str) -> float | None:
        written = self._info(name).mtime
        return None if written is None else float(written.timestamp())

    @contextmanager
    def publishing(self, name: str) -> Iterator[BinaryIO]:
        with self._naming(name), self._fs.open_output_stream(self._at(name)) as stream:
            yield stream

    def publish(self, name: str, unfinished: str, data: bytes, check: Callable[[], object], replace: bool) -> None:
        with self.publishing(unfinished) as file:
            file.write(data)
        try:
            check()
            if not replace and self.written_s(name) is not None:  # the store has no way to refuse a second writer
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.file(name))
            with self.publishing(name) as file:
                file.write(data)
        finally:
            self.remove(unfinished)

    def adopt(self, name: str, other: FileStore) -> bool:
        if not isinstance(other, RemoteStore) or not self._fs.equals(other._fs):
            return False
        with other._naming(name):
            try:
                self._fs.copy_file(other._at(name), self._at(name))
            except FileNotFoundError:
                raise
            except OSError:  # such as a file above the largest size that S3 copies
                return False
        return True

    def sync(self) -> None:
        """Do nothing: what the store has copied is durable."""

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError), self._naming(name):
            self._fs.delete_file(self._at(name))

    def lock(self) -> None:
        with self._naming(""):
            self._fs.create_dir(self._path)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _info(self, name: str) -> Any:
        """Return what pyarrow.fs knows of a file; of the folder for the name ""."""
        with self._naming(name):
            return self._fs.get_file_info(self._at(name) if name else self._path)

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Name the file in errors: those of stores name none, and their text is long."""
        try:
            yield
        except OSError as error:
            if error.filename is None:
                raise type(error)(error.errno or 5, str(error).partition("\n")[0], self.file(name)) from error
            raise


FileStore = LocalStore | RemoteStore


def place_of(text: str) -> str:
    """Return a path as it is; a URI without secrets: it may have keys before the host, and options after the path."""
    if "://" not in text:
        return text
    scheme, mark, rest = re.split("[?#]", text, maxsplit=1)[0].partition("://")  # urlsplit raises for some hosts
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}".rstrip("/")


def filesystem_at(uri: str) -> tuple[Any, str]:
    """Return the file system of a URI, and the path in it. Raises pyarrow.ArrowInvalid, also without its library."""
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem

    try:
        return cast("tuple[Any, str]", FileSystem.from_uri(uri))
    except ImportError as error:  # hf:// and the schemes of fsspec have libraries
        raise ArrowInvalid(str(error)) from error


def store_at(place: str | os.PathLike[str]) -> FileStore:
    """Return the folder on a path or at a URI of pyarrow.fs. Raises ValueError for a URI that pyarrow cannot open."""
    text = os.fspath(place)
    if not isinstance(text, str) or "://" not in text:
        return LocalStore(Path(place))
    from pyarrow.fs import LocalFileSystem

    filesystem, path = filesystem_at(text)
    return LocalStore(Path(path)) if isinstance(filesystem, LocalFileSystem) else RemoteStore(text, filesystem, path)
