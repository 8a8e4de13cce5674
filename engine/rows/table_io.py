"""The tables of an engine to files and from files, in the formats of ``penstock.contrib.formats``."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from penstock.base.errors import CapacityError, InputError, StateError, UsageError, listed
from penstock.base.events import report
from penstock.io.table_files import TablesWriter, check_table, read_table, table_path
from penstock.io.table_formats.table_format import (
    NO_STATE,
    Contents,
    OptimizerState,
    Tensor,
    format_of,
    joined_contents,
)
from penstock.io.table_formats.tensor_blocks import blocks
from penstock.io.table_formats.tensor_names import KEYS, Assigned, WantedTable, advice, assign, without_patterns
from penstock.model.config.specs import WEIGHTS
from penstock.model.config.tables import FromFile
from penstock.model.frames import Float32, Int64
from penstock.model.updates.optimizer_class import POSITIVE
from penstock.rows.derived_slots import DerivedSlots
from penstock.rows.optimizer_states import differences, first_step
from penstock.rows.table_set import TableSet

Block = tuple[str, Int64, Mapping[str, Float32]]  # of a table: ids, part → rows


@dataclass(frozen=True)
class LoadedTables:
    """What ``Engine.read_tables`` took from a source, and what it did not.

    Attributes
    ----------
    format : str
        Of the source; of several, the different ones, joined by commas.
    tables : mapping
        Table → part ("parameters" or a slot) → its name in the source.
    rows : mapping
        Table → the number of rows that were set.
    initial : mapping
        Table → the parts that the source lacks; they keep their values.
    derived : mapping
        "TABLE/SLOT" → the number of rows whose slot the source lacks, and which was derived from the weights: of
        optimizers that compute the weights from the slots alone.
    skipped : mapping
        Name in the source → why it was not taken.
    raised : mapping
        "TABLE/SLOT" → the number of zeros that became 1.2e-38, because the optimizer divides by them without an
        epsilon.
    notes : tuple of str
        A sentence for each table with rows whose slot could not be derived, whose optimizer differs from torch's, or
        that starts from the vectors of a file, which these rows have replaced.
    step : int or None
        The updates that the source's optimizers have made, if the rate of an update here depends on its step: what to
        give ``gate.set_global_step``. ``penstock import`` begins at it.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.Adagrad(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> _ = engine.write_tables("tables")
    >>> engine.read_tables("tables").rows
    {'user': 8}
    """

    format: str
    tables: Mapping[str, Mapping[str, str]]
    rows: Mapping[str, int]
    initial: Mapping[str, tuple[str, ...]]
    derived: Mapping[str, int]
    skipped: Mapping[str, str]
    raised: Mapping[str, int]
    notes: tuple[str, ...] = ()
    step: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data.

        Returns
        -------
        dict
        """
        return asdict(self)


def write_tables(tables: TableSet, directory: str | os.PathLike[str]) -> list[Path]:
    """Write one Parquet file per table, all of them or none; return their paths.

    Over several processes the first one writes; the others read along, and return none.
    """
    tables.held.check_all("a file of --out")
    processes = tables.processes
    if processes is not None and processes.rank:
        for name in tables.specs:
            deque(_blocks(tables.table(name).stream, len(tables.parts(name))), maxlen=0)
        processes.agree("the end of write_tables")
        return []
    with TablesWriter(Path(directory)) as writer:
        for name in tables.specs:
            columns, dynamic = _columns(tables, name), tables.dynamic.get(name)
            keys, stream = (None, tables.whole_table(name).stream) if dynamic is None else dynamic.sorted()
            writer.write(name, columns, _blocks(stream, len(columns)), keys)
    for name, (num_rows, first) in writer.not_finite.items():
        report("wrote_not_finite", table=name, rows=num_rows, id=first)
    if processes is not None:
        processes.agree("the end of write_tables")
    return writer.written


def _blocks(stream: Callable[[int], Iterable[Float32]], num_parts: int) -> Iterator[tuple[Float32, ...]]:
    """Yield the rows of all parts of a table, block by block."""
    return zip(*(stream(part) for part in range(num_parts)), strict=True)


def _columns(tables: TableSet, name: str) -> dict[str, int]:
    """Return the columns of a table's file, in the order of the table's parts, with the floats of each per row."""
    return dict(zip(["row", *list(tables.parts(name))[1:]], tables.table(name).part_dims, strict=True))


def _states(assigned: Assigned, states: Mapping[str, OptimizerState]) -> dict[str, OptimizerState]:
    """Return the states of an optimizer that the slots of tables are part of, by table."""
    by_table = {}
    for name, parts in assigned.parts.items():
        found = [states[tensor] for part, tensor in parts.items() if part != WEIGHTS and tensor in states]
        if found:
            by_table[name] = found[0]
    return by_table


class TablesReader:
    """Reads sources of any format into the tables of an engine, block by block.

    paths : several only of tensors, whose names then differ
    new_tables : tables that the source lacks keep their rows
    names : of a table or tensor in the source → TABLE or TABLE/SLOT, or patterns; others have the names of the
        configuration
    stack : closes the sources
    rates : the learning rate of each tag at the next step; NaN: unknown
    Whatever needs no row is checked now. Raises InputError, UsageError.
    """

    def __init__(
        self,
        tables: TableSet,
        paths: Sequence[Path],
        new_tables: bool,
        names: Mapping[str, str],
        stack: ExitStack,
        rates: Sequence[float],
    ) -> None:
        self._tables, self._new_tables = tables, new_tables
        self._source = ", ".join(map(str, paths))
        self._formats = {path: format_of(path) for path in paths}
        self._title = " and ".join(dict.fromkeys(each.title for each in self._formats.values()))
        for name in tables.dynamic:
            if not any(each.has_keys for each in self._formats.values()):
                problem = f"table '{name}' is dynamic, and {self._title} has no keys"
                raise UsageError(f"{problem}: load files that --out wrote")
        self._derived, self._states = DerivedSlots(tables, rates), dict[str, OptimizerState]()
        self._rows: Counter[str] = Counter()
        self._raised: Counter[str] = Counter()
        self._wanted = {name: self._wanted_table(name) for name in self._tables.specs}
        if any(each.contents is None for each in self._formats.values()):
            if len(paths) != 1:
                raise UsageError(
                    f"{self._source}: give a folder of Parquet files alone; it has all parts of its tables"
                )
            self._path = paths[0]
            self._assigned = self._assign_files(names)
            self._blocks = self._parquet_blocks()
        else:
            contents = joined_contents(self._formats, stack)
            self._assigned = self._assign_tensors(contents, names)
            self._assigned.skipped.update(contents.others)
            self._states = _states(self._assigned, contents.states)
            self._blocks = self._tensor_blocks(contents.tensors)

    def read(self) -> dict[str, None]:
        """Set the rows, and return the names of all tables: any row may have changed.

        Raises InputError and StateError, also after other rows were set.
        """
        try:
            for name, ids, values in self._blocks:
                index = self._tables.parts(name)
                rows, own_values = self._tables.held.select(name, ids, list(values.values()))
                numbers = [index[part] for part in values]
                stored = self._tables.set_rows(name, rows, dict(zip(numbers, own_values, strict=True)))
                self._rows[name] += len(rows)
                if self._derived.slot(name) not in (None, *values):
                    self._derived.derive(name, stored)
        except CapacityError as error:
            raise StateError(f"{self._source}: {error}") from None
        self._derived.warn()
        return dict.fromkeys(self._tables.specs)

    def loaded(self) -> LoadedTables:
        """Return what was read."""
        taken = self._assigned.parts
        derived = {place: count for place, count in self._derived.num_rows.items() if count}
        initial = {
            name: tuple(
                part
                for part in self._tables.parts(name)
                if part not in taken.get(name, ()) and f"{name}/{part}" not in derived
            )
            for name in self._tables.specs
        }
        initial = {name: parts for name, parts in initial.items() if parts}
        raised = {place: count for place, count in self._raised.items() if count}
        skipped = self._assigned.skipped
        specs, with_slots = self._tables.specs, [name for name, parts in taken.items() if set(parts) - {WEIGHTS, KEYS}]
        counting = [name for name in with_slots if specs[name].rule.counts_steps]
        step, notes = first_step({name: self._states.get(name, NO_STATE).step for name in counting})
        for name, state in self._states.items():
            notes += differences(self._tables.specs[name], state)
        for name, parts in taken.items():
            initializer = specs[name].initializer
            if WEIGHTS in parts and isinstance(initializer, FromFile):
                rows = f"the rows of '{parts[WEIGHTS]}' have replaced the vectors of {initializer.path}"
                notes.append(f"table '{name}': {rows}, which it starts from")
        notes = [*self._derived.notes, *notes]
        form = ", ".join(dict.fromkeys(each.name for each in self._formats.values()))
        return LoadedTables(form, taken, dict(self._rows), initial, derived, skipped, raised, tuple(notes), step)

    def _assign_files(self, names: Mapping[str, str]) -> Assigned:
        """Return the columns of each table's file, and the name of the file as ``id``."""
        specs, there = self._tables.specs, [unquote(path.stem) for path in sorted(self._path.glob("*.parquet"))]
        called = {target: name for name, target in without_patterns(there, self._wanted, names).items()}
        for target, name in called.items():
            if target not in specs or not table_path(self._path, name).exists():
                expected = "a file there and a table of the configuration"
                raise UsageError(f"--map {name}={target} (names=): expected {expected} ({listed(specs)})")
        files = {table: called.get(table, table) for table in specs}
        if self._new_tables:
            files = {table: file for table, file in files.items() if table_path(self._path, file).exists()}
        if not files:
            raise InputError("no file for any table of the configuration", source=str(self._path))
        parts = {}
        for table, file in files.items():
            present = check_table(self._path, file, _columns(self._tables, table))
            parts[table] = {WEIGHTS if column == "row" else column: f"{file}.{column}" for column in present}
        self._files = files
        others = {path.name for path in self._path.glob("*.parquet")}
        others -= {table_path(self._path, file).name for file in files.values()}
        return Assigned(parts, dict.fromkeys(sorted(others), "no table of the configuration has such a name"))

    def _parquet_blocks(self) -> Iterator[Block]:
        for table, file in self._files.items():
            spec, dynamic = self._tables.specs[table], self._tables.dynamic.get(table)
            size = spec.vocabulary_size if dynamic is None else dynamic.id_range
            for ids, columns in read_table(self._path, file, size, _columns(self._tables, table)):
                yield table, ids, {WEIGHTS if name == "row" else name: rows for name, rows in columns.items()}

    def _assign_tensors(self, contents: Contents, names: Mapping[str, str]) -> Assigned:
        assigned = assign(contents, self._wanted, names, self._source)
        for name in self._wanted:
            if WEIGHTS not in assigned.parts.get(name, {}) and not (self._new_tables and name not in assigned.parts):
                problem = f"no weights of table '{name}' in {self._title}; there: {contents.text()}"
                raise InputError(f"{problem}; {advice(contents, self._wanted[name])}", source=self._source)
        if not assigned.parts:
            raise InputError("no tensor of any table of the configuration", source=self._source)
        return assigned

    def _wanted_table(self, name: str) -> WantedTable:
        spec, dynamic = self._tables.specs[name], self._tables.dynamic.get(name)
        dims = dict(zip(self._tables.parts(name), self._tables.table(name).part_dims, strict=True))
        optimizer = spec.optimizer
        divides = optimizer.first_slot_range(optimizer.proto_values()) == POSITIVE
        return WantedTable(
            name,
            type(optimizer).__name__,
            dims,
            spec.vocabulary_size if dynamic is None else None,
            None if dynamic is None else dynamic.settings.key_type,
            optimizer.slot_names[0] if divides else None,
        )

    def _tensor_blocks(self, tensors: Mapping[str, Tensor]) -> Iterator[Block]:
        for name, parts in self._assigned.parts.items():
            raised: Counter[str] = Counter()
            for ids, values in blocks(tensors, self._wanted[name], parts, self._source, raised):
                yield name, ids, values
            self._raised.update({f"{name}/{part}": count for part, count in raised.items()})
