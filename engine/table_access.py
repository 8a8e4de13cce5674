"""The tables of an engine as its users read and write them, between two steps."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.activations.deduplication import DeduplicationData
from penstock.activations.exchange import Exchange
from penstock.core import EngineCore
from penstock.errors import UsageError
from penstock.frames import Float32, Int64
from penstock.learning_rates import Rates
from penstock.lockstep import sharing_errors
from penstock.tables.table_io import reading, write_tables
from penstock.validation import place

if TYPE_CHECKING:
    import jax
    import pyarrow as pa


log = logging.getLogger("penstock")


class TableAccess:
    """The methods of an Engine that read and write its tables. core : its tables and the lock between two steps"""

    core: EngineCore

    @property
    def global_step(self) -> int:
        """Number of openings of the gate, counted on from the last ``gate.set_global_step``."""
        return self.core.global_step

    def table(self, name: str) -> jax.Array:
        """Return a copy of the weights in id order, (vocabulary_size, dim); row-sharded if the mesh divides it."""
        with self.core.still():
            return self.core.tables.whole(name).whole()

    def slots(self, name: str) -> dict[str, jax.Array]:
        """Return copies of the optimizer's slots, (vocabulary_size, dim) in id order, by TensorFlow's names.

        A slot of RowWiseAdagrad is (vocabulary_size, 1).
        """
        with self.core.still():
            table = self.core.tables.whole(name)
            return {slot: table.whole(part) for slot, part in self.core.tables.parts(name).items() if part}

    def lookup(self, name: str, ids: Any, forward: bool = False) -> Float32:
        """Return the weights of some ids, repeats allowed: float32 (n, dim). Cheaper than ``table`` for a few rows.

        forward : as a forward pass sees them, through the table's simulated quantization if it has one
        """
        with self.core.still():
            return self.core.tables.lookup(name, self.core.tables.valid_ids(name, ids), forward)

    def keys(self, name: str) -> pa.Array:
        """Return the keys of a dynamic table that have a row, ascending: an Arrow array of its key type."""
        import pyarrow as pa

        with self.core.still():
            table = self.core.tables.dynamic_table(name)
            return pa.array(np.sort(table.as_given(table.directory.state(expired=False)["key"])))

    def records(self, name: str, keys: Any) -> dict[str, npt.NDArray[Any]]:
        """Return the records of keys of a dynamic table, as arrays (n,) by name.

        present : bool, whether the key has a row; last : int64, the clock when it occurred last, -1: unknown
        count : int64, its count for LFU, 0 without; waiting : int64, occurrences so far of a key that waits for
        admission
        """
        with self.core.still():
            table = self.core.tables.dynamic_table(name)
            records = table.directory.records(table.valid_keys(keys))
        return {"present": records.pop("row") >= 0, **records}

    def explain(self, name: str, key: int) -> str:
        """Return one line about a key of a dynamic table: present, waiting for admission, or absent."""
        if np.ndim(key):
            raise UsageError(f"table '{name}': expected one key, got {key!r}")
        record = {field: array[0] for field, array in self.records(name, [key]).items()}
        settings = self.core.tables.dynamic_table(name).settings
        last = f"last at {'time' if settings.clock == 'time' else 'step'} {record['last']}"
        if record["present"]:
            return f"present; {last}" + (f"; count {record['count']}" if settings.evict == "lfu" else "")
        if record["waiting"] >= settings.min_count:
            return f"waits for room, {last}"
        if record["waiting"]:
            return f"waits: {record['waiting']} of {settings.min_count} {settings.count}, {last}"
        return "absent"

    def rows(self, name: str, keys: Any) -> npt.NDArray[np.int32]:
        """Return the row on the devices of keys of a dynamic table, int32 (n,), -1: none. Valid until the next step."""
        with self.core.still():
            table = self.core.tables.dynamic_table(name)
            return table.directory.rows(table.valid_keys(keys))

    def retrieve_parameters(self, name: str) -> dict[str, Float32]:
        """Return weights ("parameters") and slots, in id order: TensorFlow's RetrieveTPUEmbedding…Parameters."""
        with self.core.still():
            return self.core.tables.retrieve(name)

    def load_parameters(self, name: str, rows: Any, *, ids: Any = None, **slots: Any) -> None:
        """Set the weights and every slot: TensorFlow's LoadTPUEmbedding…Parameters.

        rows, and each slot by its name : (vocabulary_size, dim) in id order; with ``ids``: (n, dim) for those ids only.
        A slot of RowWiseAdagrad has one column.
        """
        self.core.check_whole()
        row_ids, values = self.core.tables.checked(name, rows, ids, slots)
        self.core.load(partial(self.core.tables.set_rows, name, row_ids, values), {name: row_ids})

    def state_hash(self) -> str:
        """Return the SHA-256 (hex) of tables, slots and global step; equal states have equal hashes on any mesh.

        The hash covers each table, in the order of names: the name and a zero byte, vocabulary_size and dim (int64),
        the weights, then each slot in slot order; rows in id order, little-endian float32 (16-bit weights as they
        are). Of a dynamic table, the rows are those of its keys, in order of the hashed key, and the keys, their
        clocks and counts, the waiting keys and the clock follow. The global step (int64) ends it.
        """
        with self.core.still():
            return self.core.tables.hash(self.global_step)

    def write_tables(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write ``<table>.parquet`` for every table: id, row, one column per slot, in id order."""
        with self.core.still():
            return write_tables(self.core.tables, place("directory", directory))

    def read_tables(self, directory: str | os.PathLike[str]) -> None:
        """Load tables that ``write_tables`` wrote: set every row listed, and keep the others as they are.

        A slot without a column keeps its value, so that weights from another system can be loaded. Raises InputError:
        if a file is missing or has other columns, nothing has changed; after a bad row in a file, create a new engine.
        """
        with self.core.still():
            tables = dict.fromkeys(self.core.config.table_names)
            self.core.load(reading(self.core.tables, place("directory", directory)), tables)

    def warmup(self) -> int:
        """Compile every program that steps, lookups and checkpoints need; return their number.

        Without it each program is compiled on first use, which takes seconds on a TPU. Nothing is applied. The logger
        "penstock" reports (INFO) how many programs there are, and then how long they took.
        """
        began_s = time.perf_counter()
        with self.core.still():
            count = self.core.tables.warm()
        log.info("warm-up: %d programs compiled in %.1f s", count, time.perf_counter() - began_s)
        return count

    def _looked_up(self, ids: Mapping[str, Int64]) -> tuple[dict[str, Float32], int]:
        """Return the rows by table as a forward pass sees them, and their global step."""
        with self.core.still():
            return {name: self.core.tables.lookup(name, array, True) for name, array in ids.items()}, self.global_step


class ActivationAccess:
    """The methods of an Engine that receive activations and send their gradients."""

    core: EngineCore
    _exchange: Exchange

    def recv_activations(self, features: Any, weights: Any = None) -> tuple[Any, DeduplicationData]:
        """Look up a batch: return activations nested like ``features``, and the data that ``send_gradients`` needs.

        features : ids nested like the configuration's features; weights : the same, or None (docs/activations.md)
        """
        with sharing_errors(self.core):
            return self._exchange.recv(features, weights)

    def send_gradients(
        self,
        gradients: Any,
        learning_rates: Rates = None,
        deduplication_data: DeduplicationData | None = None,
        time: int | None = None,
    ) -> bool:
        """Apply gradients of activations, float32, nested like the features, as one frame; None at a leaf means zeros.

        Returns False if the frame was stale and dropped. Mirrors XlaSendTPUEmbeddingGradients (docs/activations.md).
        """
        with sharing_errors(self.core):
            return self._exchange.send(gradients, learning_rates, deduplication_data, time)
