"""Decode the batches of one schema, and split them into pieces where the key of frames, (step, contributor), changes.

Sources open files and yield the batches; this module decides which columns have which roles, and how they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pyarrow as pa

from penstock.base.errors import ConfigError, InputError
from penstock.io.decoding.coded_tables import coded_tables
from penstock.io.decoding.examples import ExampleRoles, decode_examples, resolve_examples
from penstock.io.decoding.framing import FramePiece, PlainPieces
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.decoding.role_guesses import missing_roles
from penstock.io.decoding.row_columns import decode_rows
from penstock.io.decoding.rows import DecodedBatch, plain_columns, rows_of
from penstock.io.decoding.schema import REQUIRED, TABLE_KEY, Roles, resolve
from penstock.io.decoding.source_batch import SourceBatch, TableRun, find_all_bad_rows
from penstock.io.sources.batch import Batch, Part, PlainRoles
from penstock.io.sources.plain_messages import BatchRun
from penstock.pyx.plain_batches import PlainRows

# To pass several small frames at once, read at most this many rows ahead, if the source has them without a wait.
MAX_ROWS_AHEAD = 1 << 13

Decoder = Callable[[Batch], DecodedBatch]


class BatchPieces:
    """Decodes the batches of a part, and of any other part with the same schema, and splits them into pieces.

    names : of the columns in use; unread : of the others; batches_are_frames : whether every batch ends its frame
    maybe_step : the unread columns of integers, one of which may be meant as the step; [] if a column is the step

    Raises InputError or ConfigError for a schema without what the options need.
    """

    def __init__(self, part: Part, options: ReadOptions) -> None:
        self._part, self._options = part, options
        self._roles = roles = self._resolved()
        self.names = roles.names
        unread = [field for field in part.schema if field.name not in self.names]  # several may have one name
        self.unread = [field.name for field in unread]
        has_step, rows = roles.step is not None, options.contribution_rows
        integers = [field.name for field in unread if pa.types.is_integer(field.type)]
        self.maybe_step = [] if has_step else integers
        self._needs_boundaries = rows is None and not has_step
        takes_batches = self._needs_boundaries and part.has_boundaries and not part.ends_are_marked
        self.batches_are_frames = takes_batches or rows == "batch"
        self._table = self._default_table()
        self._decode, self._plain, self._coded = self._decoder(), None, None
        if options.unvalidated and not isinstance(roles, ExampleRoles):
            # Without a step, frames that span batches, and frames of N rows, are composed batch by batch.
            reads_ahead = options.frame_rows is None and (has_step or self.batches_are_frames)
            most_rows = MAX_ROWS_AHEAD if reads_ahead else 1
            self._plain = plain_columns(roles, self._table, options.sizes, most_rows, self.batches_are_frames)
            self._coded = coded_tables(roles, options.sizes)

    @property
    def plain(self) -> PlainRoles | None:
        """Return the columns of plain batches, which are read several at once; None: no batch is plain."""
        reader = self._plain or self._coded
        return None if reader is None else reader.roles

    def pieces(self, batch: Batch | BatchRun) -> Iterator[FramePiece | PlainPieces]:
        """Split a batch where the key changes. Raises InputError if nothing says where its frames end."""
        coded = None
        if isinstance(batch, BatchRun):
            if self._coded is None:
                yield self._plain_pieces(batch.rows, batch.batch)
                return
            coded, batch = self._coded.read_message(batch), batch.batch()
        elif self._coded is not None:
            coded = self._coded.read(batch.data)
        if self._needs_boundaries and not self._part.has_boundaries and not batch.ends_frame:
            raise missing_roles(self._part.schema, batch.source, ["step"], self._options.columns, batch.data)
        if batch.index is None and self._options.contribution_rows == "batch":
            problem = "a Parquet file has no record batches; give --contribution-rows N (contribution_rows=N)"
            raise InputError(problem, source=batch.source)
        plain = None if self._plain is None else self._plain.read(batch.data)
        if plain is not None:
            yield self._plain_pieces(plain, lambda *_: batch)
            return
        if coded is not None:
            source = SourceBatch(batch, self._roles, self._decode, True, coded.tables)
            for start, stop, step in [(0, coded.tables[-1].stop, None)] if coded.steps is None else coded.steps:
                yield FramePiece(source, start, stop, (step, None))
            return
        content, sizes = self._decode(batch), self._options.sizes
        unvalidated = self._options.unvalidated and not content.may_be_bad(sizes)
        bad = None if unvalidated else find_all_bad_rows(content, sizes)
        source = SourceBatch(batch, self._roles, self._decode, unvalidated, None, bad, content)
        for start, stop, key in content.frame_columns.runs(batch):
            yield FramePiece(source, start, stop, key)

    def _plain_pieces(self, rows: PlainRows, batch_at: Callable[[int, int], Batch]) -> PlainPieces:
        assert self._plain is not None
        table, blocks = self._plain.roles.table, rows.blocks

        def batch_of(number: int, rows_before: int) -> SourceBatch:
            block_rows = rows_of(blocks, number, rows.are_own)
            run = TableRun(0, len(block_rows.ids), table, block_rows)
            return SourceBatch(batch_at(number, rows_before), self._roles, self._decode, True, (run,))

        return PlainPieces(table, blocks, batch_of, rows.bounds, rows.steps)

    def _resolved(self) -> Roles:
        options, part = self._options, self._part
        examples = resolve_examples(part.schema, part.name, options)
        if examples is None:
            self._check_no_role_is_missing()
        roles = examples or resolve(part.schema, part.name, options)
        if options.rates_needed and roles.learning_rates is None:
            raise ConfigError(
                "the configuration has dynamic learning rates and nothing gives the value of tag "
                f"{', '.join(map(str, options.rates_needed))}: add --learning-rate {options.rates_needed[0]}=VALUE, "
                f"or a 'learning_rates' column ({part.name})"
            )
        return roles

    def _check_no_role_is_missing(self) -> None:
        """Raise InputError with all roles that these options need and no column has.

        If only 'step' is missing, return: a stream without rows needs none, and ``pieces`` raises at its first batch.
        """
        options, part = self._options, self._part
        columns, has_table = options.columns, TABLE_KEY in (part.schema.metadata or {})
        needed = [*REQUIRED, *(["time"] if options.needs_time else [])]
        if options.contribution_rows is None and not part.has_boundaries:
            needed.append("step")
        if options.table is None and len(options.sizes) > 1 and not has_table:
            needed.append("table")
        missing = [role for role in needed if role not in columns and role not in part.schema.names]
        if missing and missing != ["step"]:
            raise missing_roles(part.schema, part.name, missing, columns, self._sample(), options.sizes)

    def _sample(self) -> pa.RecordBatch | None:
        """Return the first batch of the part with rows; None if there is none, or it is damaged. Consumes the part."""
        try:
            with closing(self._part.batches(self._part.schema.names)) as batches:
                return next((batch.data for batch in batches if batch.data.num_rows), None)
        except InputError:
            return None

    @property
    def needs_table(self) -> bool:
        """Return whether rows name no table, nor does the schema, and the configuration has several."""
        roles = self._roles
        return roles.table is None and roles.default_table is None and len(self._options.sizes) > 1

    def _default_table(self) -> str | None:
        """Return the table of rows that name none."""
        only = next(iter(self._options.sizes)) if len(self._options.sizes) == 1 else None
        return next((name for name in (self._roles.default_table, self._options.table) if name is not None), only)

    def _decoder(self) -> Decoder:
        options, roles, table = self._options, self._roles, self._table
        if isinstance(roles, ExampleRoles):
            return lambda batch: decode_examples(batch, roles, options)
        return lambda batch: decode_rows(batch, roles, table, options.num_tags)
