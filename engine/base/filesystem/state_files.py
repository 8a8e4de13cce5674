"""Reading files of state that anybody may have written: regular files only, and JSON that cannot exhaust the stack."""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file, or a link to one. Raises OSError for a pipe, which would wait, a device or a folder."""
    return open(path, "rb", opener=_open_if_regular)


def _open_if_regular(path: str, flags: int) -> int:
    file = os.open(path, flags | os.O_NONBLOCK)  # which opens a pipe without a writer, and changes no regular file
    kind = stat.S_IFMT(os.fstat(file).st_mode)
    if kind == stat.S_IFREG:
        return file
    os.close(file)
    number, text = (errno.EISDIR, os.strerror(errno.EISDIR)) if kind == stat.S_IFDIR else (errno.EINVAL, "not a file")
    raise OSError(number, text, path)


def parsed_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> Any:
    """Parse the JSON of a regular file. Raises OSError and ValueError."""
    with open_regular(path) as file:
        return parsed_json(file.read())
