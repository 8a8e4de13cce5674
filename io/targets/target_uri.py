"""The spelling of targets: ``redis://…``, ``lmdb:PATH``, ``lance:URI``, ``delta:URI``, ``parquet:DIR``, a function."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from penstock.errors import UsageError
from penstock.io.targets.delta_lake import DeltaLake
from penstock.io.targets.kafka_topic import KafkaTopic
from penstock.io.targets.lance_dataset import LanceDataset
from penstock.io.targets.lmdb_file import LmdbFile
from penstock.io.targets.parquet_folder import ParquetFolder
from penstock.io.targets.python_function import PythonFunction
from penstock.io.targets.redis_hashes import RedisHashes
from penstock.io.targets.target import Target

_BY_SCHEME: dict[str, Callable[[str], Target]] = {
    "lmdb": LmdbFile,
    "lance": LanceDataset,
    "delta": DeltaLake,
    "parquet": ParquetFolder,
}
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_EXPECTED = (
    "redis://HOST:PORT/DATABASE, kafka://BROKER:PORT/TOPIC, lmdb:PATH, lance:URI, delta:URI, parquet:DIR or "
    "module:function"
)


def open_target(text: str, state: str | os.PathLike[str] | None = None) -> Target:
    """Return the target that a text names. state : file for the number of a function's last delta

    Raises UsageError for another text, and if the target's library is not installed. Nothing is connected yet.
    """
    scheme, _, rest = text.partition(":")
    is_function = scheme not in _BY_SCHEME and _FUNCTION.fullmatch(text) is not None
    if state is not None and not is_function:
        raise UsageError(f"--state: only a function needs it; {text} stores the number of its last delta itself")
    if re.match(r"(rediss?|unix)://", text):
        return RedisHashes(text)
    if scheme == "kafka":
        return KafkaTopic(text)
    if scheme in _BY_SCHEME:
        return _BY_SCHEME[scheme](rest)
    if is_function:
        if state is None:
            raise UsageError(f"{text}: give --state FILE, which stores the number of the function's last delta")
        return PythonFunction(text, state)
    raise UsageError(f"--into {text}: expected {_EXPECTED}")
