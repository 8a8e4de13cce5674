"""Decode the batches of one schema, and split them into pieces of one key: which columns play roles, and how they are
read. This module opens nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.errors import ConfigError, InputError, listed
from penstock.io.decoding.examples import ExampleRoles, decode_examples, resolve_examples
from penstock.io.decoding.framing import FramePiece, PlainPieces
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.decoding.row_columns import decode_rows
from penstock.io.decoding.rows import DecodedBatch, PlainColumns, plain_columns
from penstock.io.decoding.schema import Roles, column_hint, resolve
from penstock.io.decoding.source_batch import SourceBatch, find_all_bad_rows
from penstock.io.sources.batch import Batch, Part

Decoder = Callable[[Batch], DecodedBatch]


class BatchPieces:
    """The columns of a part, which its batches are decoded by. It may decode those of any part with the same schema.

    names : of the columns in use; have_no_step : whether neither a column nor a number of rows tells steps apart

    Raises InputError or ConfigError for a schema without what the options need.
    """

    def __init__(self, part: Part, options: ReadOptions) -> None:
        self._part, self._options = part, options
        self._roles = roles = self._resolved()
        self.names = roles.names
        self.have_no_step = roles.step is None and options.contribution_rows is None
        self._decode, self._plain = self._decoder(), self._plain_columns()

    def pieces(self, batch: Batch) -> Iterator[FramePiece | PlainPieces]:
        """Split a batch where the key changes. Raises InputError at a row that leaves its frame unknown."""
        if self.have_no_step and not self._part.has_boundaries:
            raise self._unknown_frames()
        plain = None if self._plain is None else self._plain.read(batch.data)
        if plain is not None:
            rows, runs = plain
            yield PlainPieces(SourceBatch(batch, self._roles, self._decode, True, rows), *runs)
            return
        content, sizes = self._decode(batch), self._options.sizes
        unvalidated = self._options.unvalidated and not content.may_be_bad(sizes)
        bad = None if unvalidated else find_all_bad_rows(content, sizes)
        source = SourceBatch(batch, self._roles, self._decode, unvalidated, None, bad, content)
        for start, stop, key in content.frame_columns.runs(batch):
            yield FramePiece(source, start, stop, key)

    def _resolved(self) -> Roles:
        options, part = self._options, self._part
        roles = resolve_examples(part.schema, part.name, options) or resolve(
            part.schema, part.name, options.columns, options.gradient_dtype, options.needs_time, options.ids_only
        )
        if roles.table is None and self._default_table(roles) is None:
            raise InputError(
                "the rows name no table: no 'table' column, no 'penstock.table' in the schema's metadata, "
                f"and the configuration has several ({listed(options.sizes)}); give --table"
                + column_hint("table", part.schema),
                source=part.name,
            )
        if options.rates_needed and roles.learning_rates is None:
            raise ConfigError(
                "the configuration has dynamic learning rates and nothing gives the value of tag "
                f"{', '.join(map(str, options.rates_needed))}: add --learning-rate {options.rates_needed[0]}=VALUE, "
                f"or a 'learning_rates' column ({part.name})"
            )
        return roles

    def _default_table(self, roles: Roles) -> str | None:
        """Return the table of rows that name none."""
        only = next(iter(self._options.sizes)) if len(self._options.sizes) == 1 else None
        return next((name for name in (roles.default_table, self._options.table) if name is not None), only)

    def _decoder(self) -> Decoder:
        options, roles = self._options, self._roles
        if isinstance(roles, ExampleRoles):
            return lambda batch: decode_examples(batch, roles, options)
        table = self._default_table(roles)
        return lambda batch: decode_rows(batch, roles, table, options.num_tags)

    def _plain_columns(self) -> PlainColumns | None:
        if isinstance(self._roles, ExampleRoles) or not self._options.unvalidated:
            return None
        return plain_columns(self._roles, self._default_table(self._roles), self._options.sizes)

    def _unknown_frames(self) -> InputError:
        return InputError(
            f"the batches of this {self._part.container or 'source'} mean nothing by themselves, so without a 'step' "
            "column its frames are unknown: give --contribution-rows N (contribution_rows=N)"
            + column_hint("step", self._part.schema),
            source=self._part.name,
        )
