"""Open the files of a file system as parts; the first bytes determine the container.

Local files are memory-mapped, so rows are read in place and no file is loaded as a whole. Those of a store are read in
large requests (``remote_file``).
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import pyarrow as pa
import pyarrow.fs

from penstock.base.errors import InputError
from penstock.base.filesystem.pipes import open_reader
from penstock.base.filesystem.read_ahead import ThreadCall
from penstock.io.sources.batch import Part, arrow_errors
from penstock.io.sources.ipc_file import ARROW_FILE, ipc_file_part
from penstock.io.sources.ipc_stream import Forward, Mapped, ipc_stream_part, open_stream
from penstock.io.sources.parquet import PARQUET, parquet_part
from penstock.io.sources.remote_file import RemoteFile, opening_file


def open_file(
    fs: pa.fs.FileSystem,
    path: str,
    name: str,
    stack: ExitStack,
    allow_missing_end: bool,
    opening: ThreadCall[RemoteFile] | None = None,
) -> Part:
    """Return the part of one file; the stack closes its open files. opening : the file, if it is being opened"""
    local = isinstance(fs, pa.fs.LocalFileSystem)
    if local and not os.path.isfile(path):  # a pipe or a device: can be read only once
        with arrow_errors("cannot open", name):
            stream = stack.enter_context(open_reader(path))
        return open_stream(stream, name, stack, allow_missing_end)
    with arrow_errors("cannot open", name):
        if local and not os.path.getsize(path):
            raise InputError("the file is empty (0 bytes): not even a schema", source=name)
        file = stack.enter_context(pa.memory_map(path) if local else (opening or opening_file(fs, path)).result())
        size = file.size()
        head = bytes(file.read(8))
        file.seek(0)
    if not head:
        raise InputError("the file is empty (0 bytes): not even a schema", source=name)
    if isinstance(file, RemoteFile) and not head.startswith(PARQUET):
        file.blocks.read_in_order()
    if head.startswith(ARROW_FILE):
        return ipc_file_part(file, size, name)
    if head.startswith(PARQUET):
        return parquet_part(file, size, name)
    if not isinstance(file, RemoteFile):
        return ipc_stream_part(file, head, Mapped(file, name), name, allow_missing_end, size)
    forward = Forward(file.blocks, name)
    forward.expect_messages()
    ahead = stack.enter_context(pa.PythonFile(forward, mode="r"))
    return ipc_stream_part(ahead, head, forward, name, allow_missing_end, size)
