"""The tables of an engine as its users read and write them, between two steps."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from penstock.base.errors import UsageError
from penstock.base.validation import place
from penstock.checkpoint.session import CheckpointSession
from penstock.core.engine_core import EngineCore
from penstock.model.frames import Float32
from penstock.model.learning_rates import LearningRates, Rates
from penstock.model.version import LookupResult, Version
from penstock.rows.table_io import LoadedTables, TablesReader, write_tables

if TYPE_CHECKING:
    import jax
    import pyarrow as pa


log = logging.getLogger("penstock")


class TableAccess:
    """The methods of an Engine that read and write its tables. core : its tables and the lock between two steps"""

    core: EngineCore
    session: CheckpointSession

    @property
    def global_step(self) -> int:
        """Number of openings of the gate, counted on from the last ``gate.set_global_step``."""
        return self.core.global_step

    @property
    def version(self) -> Version:
        """The version of the rows: the step, with the lineage and the epoch of the service that runs or ran the engine.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> before = engine.version
        >>> engine.apply({"user": ([5], [[1.0, 2.0]])})
        True
        >>> engine.version.follows(before), str(engine.version)
        (True, '1')
        """
        return self.session.positions.version(self.global_step)

    def table(self, name: str) -> jax.Array:
        """Return a copy of the weights in id order.

        Parameters
        ----------
        name : str
            The table.

        Returns
        -------
        jax.Array
            float32, shape (vocabulary_size, dim); row-sharded if the mesh divides it.

        Raises
        ------
        UsageError
            If there is no such table, or it is dynamic, which ``lookup`` and ``write_tables`` read.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.table("user").shape
        (8, 2)
        """
        with self.core.still():
            return self.core.tables.whole_table(name).whole()

    def slots(self, name: str) -> dict[str, jax.Array]:
        """Return copies of the optimizer's slots, by TensorFlow's names.

        Parameters
        ----------
        name : str
            The table.

        Returns
        -------
        dict of str to jax.Array
            float32, shape (vocabulary_size, dim), in id order; of a slot with one number per row, as of RowWiseAdagrad,
            (vocabulary_size, 1).

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.Adagrad(0.1, initial_accumulator_value=0.5), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.apply({"user": ([5], [[1.0, 2.0]])})
        True
        >>> engine.slots("user")["accumulators"][5].tolist()
        [1.5, 4.5]
        """
        with self.core.still():
            table = self.core.tables.whole_table(name)
            return {slot: table.whole(part) for slot, part in self.core.tables.parts(name).items() if part}

    @overload
    def lookup(self, table: str, ids: Any, forward: bool = False) -> Float32: ...

    @overload
    def lookup(self, table: Mapping[str, Any], *, forward: bool = False) -> LookupResult: ...

    def lookup(self, table: str | Mapping[str, Any], ids: Any = None, forward: bool = False) -> Float32 | LookupResult:
        """Return the weights of some ids of a table, or of several tables. Cheaper than ``table`` for a few rows.

        Parameters
        ----------
        table : str or mapping of str to array_like of int
            The table; or the ids of several tables, for rows of one step.
        ids : array_like of int, shape (n,)
            Of one table. Repeats allowed.
        forward : bool
            Read rows as a forward pass sees them, through the table's simulated quantization if it has one.

        Returns
        -------
        numpy.ndarray or LookupResult
            float32, shape (n, dim); of several tables a dict of such, with the attribute ``version``.

        Raises
        ------
        UsageError
            If a table is unknown, or an id is not an integer in its range.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.lookup("user", [5, 5])
        array([[1., 1.],
               [1., 1.]], dtype=float32)
        >>> engine.lookup({"user": [5]}).version
        Version('0')
        """
        tables = self.core.tables
        with self.core.reading():
            if not isinstance(table, Mapping):
                return tables.lookup(table, tables.valid_ids(table, ids), forward)
            rows = {name: tables.lookup(name, tables.valid_ids(name, each), forward) for name, each in table.items()}
            return LookupResult(rows, self.version, self.session.durable_step)

    def view(self, name: str) -> Float32:
        """Return the weights of a table on the host without a copy.

        Parameters
        ----------
        name : str
            The table.

        Returns
        -------
        numpy.ndarray
            float32, shape (vocabulary_size, dim), in id order; read-only, and not contiguous: slots lie between rows.

        Raises
        ------
        UsageError
            If the rows are on other devices, or do not lie in the order of their ids: sharded by MOD, or over several
            CPU devices.

        Notes
        -----
        Steps change the rows while they are read, and ``still`` prevents that. The array keeps the memory alive.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> weights = engine.view("user")
        >>> engine.apply({"user": ([5], [[1.0, 2.0]])})
        True
        >>> weights[5]
        array([0.9, 0.8], dtype=float32)
        """
        self.core.failure.check_readable()
        return self.core.tables.view(name)

    def still(self) -> AbstractContextManager[None]:
        """Keep all rows unchanged while in the context: steps and loads of other threads wait.

        Returns
        -------
        context manager

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> with engine.still():
        ...     float(engine.lookup("user", range(8)).sum())
        16.0
        """
        return self.core.reading()

    def keys(self, name: str) -> pa.Array:
        """Return the keys of a dynamic table that have a row, ascending.

        Parameters
        ----------
        name : str
            The table.

        Returns
        -------
        pyarrow.Array
            The keys, in the table's key type, shape (n,).

        Raises
        ------
        UsageError
            If the table is not dynamic.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user", dynamic=ps.Dynamic())
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.apply({"user": ([2**40, -7], [[1.0, 2.0], [3.0, 4.0]])})
        True
        >>> engine.keys("user").to_pylist()
        [-7, 1099511627776]
        """
        import pyarrow as pa

        with self.core.reading():
            table = self.core.tables.dynamic_table(name)
            return pa.array(np.sort(table.as_given(table.directory.state(expired=False)["key"])))

    def records(self, name: str, keys: Any) -> dict[str, npt.NDArray[Any]]:
        """Return the records of keys of a dynamic table.

        Parameters
        ----------
        name : str
            The table.
        keys : array_like of int, shape (n,)
            Any keys, also absent ones.

        Returns
        -------
        dict of str to numpy.ndarray
            Arrays of shape (n,): ``present``, bool, whether the key has a row; ``last``, int64, the clock when it
            occurred last, -1: unknown; ``count``, int64, its count for LFU, 0 without; ``waiting``, int64, occurrences
            so far of a key that waits for admission.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user", dynamic=ps.Dynamic(min_count=2))
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.apply({"user": ([2**40, -7, -7], [[1.0, 2.0]] * 3)})
        True
        >>> records = engine.records("user", [-7, 2**40])
        >>> records["present"].tolist(), records["waiting"].tolist()
        ([True, False], [0, 1])
        """
        with self.core.reading():
            table = self.core.tables.dynamic_table(name)
            records = table.directory.records(table.valid_keys(keys))
        return {"present": records.pop("row") >= 0, **records}

    def explain(self, name: str, key: int) -> str:
        """Return one line about a key of a dynamic table: present, waiting for admission, or absent.

        Parameters
        ----------
        name : str
            The table.
        key : int
            A single key.

        Returns
        -------
        str

        Raises
        ------
        UsageError
            If ``key`` is an array, or the table is not dynamic.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user", dynamic=ps.Dynamic(min_count=2))
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.apply({"user": ([2**40], [[1.0, 2.0]])})
        True
        >>> engine.explain("user", 2**40)
        'waits: 1 of 2 rows, last at step 0'
        """
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
        """Return the row on the devices of keys of a dynamic table. Valid until the next step.

        Parameters
        ----------
        name : str
            The table.
        keys : array_like of int, shape (n,)
            Any keys, also absent ones.

        Returns
        -------
        numpy.ndarray
            int32, shape (n,); -1: the key has no row.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user", dynamic=ps.Dynamic())
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.apply({"user": ([2**40], [[1.0, 2.0]])})
        True
        >>> engine.rows("user", [2**40, -7]) >= 0
        array([ True, False])
        """
        with self.core.reading():
            table = self.core.tables.dynamic_table(name)
            return table.directory.rows(table.valid_keys(keys))

    def retrieve_parameters(self, name: str) -> dict[str, Float32]:
        """Return weights and slots of a table, in id order.

        Parameters
        ----------
        name : str
            The table.

        Returns
        -------
        dict of str to numpy.ndarray
            "parameters" and every slot by its name: float32, shape (vocabulary_size, dim).

        References
        ----------
        TensorFlow's ``RetrieveTPUEmbedding…Parameters``

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.Adam(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> {part: array.shape for part, array in engine.retrieve_parameters("user").items()}
        {'parameters': (8, 2), 'momenta': (8, 2), 'velocities': (8, 2)}
        """
        with self.core.reading():
            return self.core.tables.retrieve(name)

    def load_parameters(self, name: str, rows: Any, *, ids: Any = None, **slots: Any) -> None:
        """Set the weights and every slot of a table, or of some of its rows.

        Parameters
        ----------
        name : str
            The table.
        rows : array_like of float
            The weights, shape (vocabulary_size, dim) in id order; with ``ids``: shape (n, dim), for those ids only.
        ids : array_like of int, shape (n,), or None
            The ids of the rows; None: all.
        **slots : array_like of float
            Each slot by its name, of the shape of ``rows``. A slot of one number per row has one column.

        Raises
        ------
        UsageError
            If a slot is missing or unknown, or an id or a shape is wrong; nothing has changed then.

        References
        ----------
        TensorFlow's ``LoadTPUEmbedding…Parameters``

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.Adagrad(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.load_parameters("user", [[0.25, 0.5]], ids=[5], accumulators=[[0.1, 0.1]])
        >>> engine.lookup("user", [5])
        array([[0.25, 0.5 ]], dtype=float32)
        """
        self.core.failure.check_whole()
        row_ids, values = self.core.tables.checked_parameters(name, rows, ids, slots)
        self.core.load(lambda: {name: self.core.tables.set_rows(name, row_ids, values)})

    def state_hash(self) -> str:
        """Return a hash of tables, slots and global step; equal states have equal hashes on any mesh.

        Returns
        -------
        str
            SHA-256, 64 hexadecimal digits.

        Notes
        -----
        The hash covers each table, in the order of names: the name and a zero byte, vocabulary_size and dim (int64),
        the weights, then each slot in slot order; rows in id order, little-endian float32 (16-bit weights as they are).
        Of a dynamic table, the rows are those of its keys, in order of the hashed key, and the keys, their clocks and
        counts, the waiting keys and the clock follow. The global step (int64) ends it.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.state_hash()[:12]
        'b6fe35c32994'
        """
        with self.core.reading():
            return self.core.tables.hash(self.global_step)

    def write_tables(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write ``<table>.parquet`` for every table: id, row, one column per slot, in id order.

        Parameters
        ----------
        directory : str or path
            Created if it does not exist.

        Returns
        -------
        list of pathlib.Path
            The files, in the order of the tables.

        Examples
        --------
        >>> import penstock as ps
        >>> import pyarrow.parquet
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.Adagrad(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> (path,) = engine.write_tables("tables")
        >>> pyarrow.parquet.read_schema(path).names
        ['id', 'row', 'accumulators']
        """
        with self.core.reading():
            return write_tables(self.core.tables, place("directory", directory))

    def read_tables(
        self,
        directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        new_tables: bool = False,
        names: Mapping[str, str] | None = None,
        learning_rates: Rates = None,
    ) -> LoadedTables:
        """Load tables that ``write_tables`` or another library wrote, and keep the rows that are not there.

        Parameters
        ----------
        directory : str or path, or sequence of them
            With ``<table>.parquet`` for every table; or files or folders in other formats of ``penstock import``.
        new_tables : bool
            Keep the rows of tables that are not there.
        names : mapping of str to str, or None
            The name of a table or a tensor there → the table's name, or TABLE/SLOT. One ``*`` on each side stands for
            the same text. None: the names are those of the configuration, in the manner of the format.
        learning_rates : mapping of int to float, sequence of float or None
            By tag, of the next step. Needed only for tables without a slot that determines the weights, as of FTRL.

        Returns
        -------
        LoadedTables
            The parts that were taken, with their names there, and the reasons for the others.

        Raises
        ------
        InputError
            If a table is missing or has another shape, nothing has changed; after a bad row, create a new engine.
        UsageError
            If a name does not exist, or a library is not installed.

        Notes
        -----
        A slot that is not there keeps its value, so that weights from another system can be loaded. If it determines
        the weights (FTRL, OnlineYogi), it is derived from them: a gradient of 0 keeps them. The source is read in
        blocks of rows.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> _ = engine.write_tables("tables")
        >>> engine.apply({"user": ([5], [[1.0, 2.0]])})
        True
        >>> engine.read_tables("tables").tables
        {'user': {'parameters': 'user.row'}}
        >>> engine.lookup("user", [5])
        array([[1., 1.]], dtype=float32)
        """
        with ExitStack() as stack, self.core.still():
            core = self.core
            rates = LearningRates(core.config.num_tags, learning_rates, core.config.schedules)
            expected = rates.expected(core.global_step, core.last_rates)
            given = directory if isinstance(directory, list | tuple) and directory else [directory]
            paths = [place("directory", each) for each in given]
            reader = TablesReader(core.tables, paths, new_tables, names or {}, stack, expected)
            core.load(reader.read)
        return reader.loaded()

    def warmup(self) -> int:
        """Compile every program that steps, lookups and checkpoints need.

        Returns
        -------
        int
            The number of programs; 0 if all tables lie in the host's memory, where nothing is compiled.

        Notes
        -----
        Without it each program is compiled on first use, which takes seconds on a TPU. Nothing is applied. The logger
        "penstock" reports (INFO) how many programs there are, and then how long they took.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
        >>> engine.warmup()  # on a CPU
        0
        """
        began_s = time.perf_counter()
        with self.core.still():
            count = self.core.tables.warm()
        log.info("warm-up: %d programs compiled in %.1f s", count, time.perf_counter() - began_s)
        return count
