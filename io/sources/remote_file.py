"""Files of object stores for Arrow, which are read in large requests (``penstock.base.filesystem.read_ahead``)."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.fs

from penstock.base.filesystem.read_ahead import Blocks, ThreadCall


class RemoteFile(pa.PythonFile):  # type: ignore[misc]  # pyarrow has no types
    """A file of a store. Nothing is read ahead before ``blocks.read_in_order``."""

    def __init__(self, blocks: Blocks, mode: str) -> None:
        self.blocks = blocks


def opening_file(fs: pa.fs.FileSystem, path: str) -> ThreadCall[RemoteFile]:
    """Return a file that is being opened, and its first block read."""
    return ThreadCall(lambda: RemoteFile(Blocks(fs.open_input_file(path)), "r"))
