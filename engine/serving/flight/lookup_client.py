"""The client's side of lookups over DoExchange: requests with ids of several tables, and the rows of their answers.

One stream carries many requests. It stays open between them, because a new call per lookup takes several times as
long. docs/serve.md describes the messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

import penstock.base.interrupts as interrupts
from penstock.base.errors import ServiceError, UsageError, UsageTypeError, listed
from penstock.base.validation import whole
from penstock.model.config.id_ranges import integer_ids
from penstock.model.frames import Array, Float32
from penstock.model.version import LookupResult, Version
from penstock.serving.flight.connection import Connection
from penstock.serving.flight.messages import DIMS, LOOKUP, decoded, encoded, received


class LookupRequest:
    """The ids of one lookup, as a batch. Raises UsageError for anything but integer ids by table.

    counts : table → the number of its ids
    """

    def __init__(self, ids: Mapping[str, Any], consistent: bool, timeout_ms: int) -> None:
        if not isinstance(ids, Mapping):
            raise UsageTypeError(f"ids: expected a mapping from tables to ids, got {type(ids).__name__}")
        if not all(isinstance(name, str) for name in ids):
            raise UsageTypeError(f"ids: expected the names of tables, got {listed(map(repr, ids))}")
        arrays = {name: integer_ids(name, values, flat=True) for name, values in ids.items()}
        self.counts = {name: len(array) for name, array in arrays.items()}
        self.metadata = _consistent(whole("timeout_ms", timeout_ms, 0)) if consistent else b""
        codes = np.repeat(np.arange(len(arrays), dtype=np.int32), list(self.counts.values()))
        tables, joined = pa.DictionaryArray.from_arrays(codes, _names(tuple(arrays))), pa.array(_joined(arrays))
        self.id_type = joined.type
        self.batch = pa.RecordBatch.from_arrays([tables, joined], ["table", "ids"])

    def result(self, answer: flight.FlightStreamChunk, dims: Mapping[str, int], address: str) -> LookupResult:
        """Return the rows of the answer. Raises the error that it contains. dims : of the answers, by table"""
        stamp = _stamp(answer.app_metadata.to_pybytes())
        if (error := stamp.get("error")) is not None:
            raise received(str(error.get("kind")), str(error.get("message")), address)
        values: Float32 = answer.data.column("row").values.to_numpy()  # an answer is no slice, and has no nulls
        rows, end = dict[str, Float32](), 0
        for name, count in self.counts.items():
            begin, end = end, end + count * dims[name]
            rows[name] = values[begin:end].reshape(-1, dims[name])
        if len(values) != end:
            raise ServiceError(f"{address}: expected {end:,} values of rows, got {len(values):,}")
        return LookupResult(rows, Version(stamp["version"]), stamp["durable_step"])


@lru_cache(maxsize=8)
def _stamp(metadata: bytes) -> dict[str, Any]:
    """Parse the metadata of an answer: between two steps, that of all answers is the same."""
    return decoded(metadata, "the metadata of rows")


@lru_cache(maxsize=8)
def _consistent(timeout_ms: int) -> bytes:
    """Return the metadata of a request for rows of one step."""
    return encoded({"consistent": True, "timeout_ms": timeout_ms})


@lru_cache
def _names(tables: tuple[str, ...]) -> pa.Array:
    """Return names of tables, as the same array for the same names: Arrow then sends it once per stream."""
    return pa.array(tables, pa.utf8())


def _joined(arrays: Mapping[str, Array]) -> Array:
    """Return the ids of all tables, as int64 if it holds them all, else as uint64. Those of one table are no copy."""
    if len(arrays) == 1 and (array := next(iter(arrays.values()))).dtype == np.int64:
        return array
    if all(array.dtype.kind == "i" for array in arrays.values()):
        return np.concatenate([np.zeros(0, np.int64), *arrays.values()], dtype=np.int64)
    least = min((int(array.min()) for array in arrays.values() if len(array)), default=0)
    most = max((int(array.max()) for array in arrays.values() if len(array)), default=0)
    if least < -(2**63) or most >= 2**64 or (least < 0 and most >= 2**63):
        raise UsageError(
            f"ids: {least} and {most} are not both an int64 or an uint64; look up the tables of such ids in "
            "separate calls"
        )
    kind = np.uint64 if most >= 2**63 else np.int64
    return np.concatenate([np.zeros(0, kind), *(array.astype(kind) for array in arrays.values())])


class LookupStream:
    """An open exchange for ids of one type. client : that it is open on"""

    def __init__(self, connection: Connection, schema: pa.Schema) -> None:
        self.client, options = connection.opened()
        self._writer, self._reader = self.client.do_exchange(flight.FlightDescriptor.for_path(LOOKUP), options)
        self._writer.begin(schema)
        self._dims: dict[str, int] | None = None

    def ask(self, request: LookupRequest) -> tuple[flight.FlightStreamChunk, dict[str, int]]:
        """Send a request, and return its answer and the dims of the tables. Ends with any error."""
        try:
            self._writer.write_with_metadata(request.batch, request.metadata)
            answer = self._reader.read_chunk()
            interrupts.check()
        except StopIteration:
            self._writer.close()  # raises the error that ended the stream
            raise flight.FlightUnavailableError("the service has ended the lookups") from None
        except BaseException:
            self.close()
            raise
        if self._dims is None:
            self._dims = json.loads(self._reader.schema.metadata[DIMS])
        return answer, self._dims

    def close(self) -> None:
        self._reader.cancel()
        with suppress(pa.ArrowException, flight.FlightError, OSError):  # Arrow would print them on standard error
            self._writer.close()
