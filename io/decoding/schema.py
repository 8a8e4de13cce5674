"""The row stream's schema: the role of each column, and the errors for other schemas.

Checks types and names only; ``rows`` checks the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from penstock.base.errors import InputError
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.decoding.role_guesses import missing_roles
from penstock.io.decoding.role_types import (
    FLOATS,
    WANTED,
    fits,
    is_float_list,
    is_list,
    nearest,
    storage_type,
    type_hint,
)
from penstock.io.decoding.string_ids import hashing_hint, holds_text
from penstock.io.sources.batch import arrow_errors
from penstock.model.frames import ROLES

REQUIRED = ("id", "gradient")
TABLE_KEY = b"penstock.table"


@dataclass(frozen=True)
class Roles:
    """Which field of a schema plays which role; a role that no field plays is None."""

    id: pa.Field
    gradient: pa.Field
    table: pa.Field | None
    step: pa.Field | None
    contributor: pa.Field | None
    learning_rates: pa.Field | None
    default_table: str | None  # in the schema's metadata
    bfloat16: bool  # the gradient's uint16 values are bfloat16
    time: pa.Field | None = None  # only where it is needed
    ids_only: bool = False  # the gradients are not read

    @cached_property
    def names(self) -> list[str]:
        """Return the names of the columns that are used, each once: a column may play two roles."""
        fields = [getattr(self, role) for role in ROLES if not (self.ids_only and role == "gradient")]
        return list(dict.fromkeys(f.name for f in fields if f is not None))


def resolve(schema: pa.Schema, source: str, options: ReadOptions) -> Roles:
    """Find the roles in a schema and check their types. The gradient's column must exist even if it is not read.

    Raises InputError naming the columns, what was expected and a guess.
    """
    gradient_dtype = options.gradient_dtype
    with arrow_errors("corrupt Arrow schema", source):
        fields = fields_of(schema, source, ROLES, options)
        gradient = fields["gradient"]
        assert gradient is not None
        bfloat16 = gradient_dtype == "bfloat16" or (gradient_dtype is None and _declares_bfloat16(gradient))
        if gradient_dtype == "bfloat16" and is_float_list(storage_type(gradient.type)):
            problem = f"declared as bfloat16, which Arrow holds as uint16, but it is {gradient.type}: do not declare it"
            raise InputError(problem, source=source, column=gradient.name)
        hashed = fields["id"] is not None and options.hash_ids and holds_text(fields["id"].type)
        check_types({**fields, "id": None} if hashed else fields, source, bfloat16)
        if gradient_dtype in FLOATS and storage_type(gradient.type).value_type != FLOATS[gradient_dtype]:
            problem = f"expected lists of {gradient_dtype}, as gradient_dtype says, got {gradient.type}"
            raise InputError(problem, source=source, column=gradient.name)
        default = (schema.metadata or {}).get(TABLE_KEY)
        return Roles(
            **fields,
            default_table=None if default is None else default.decode("utf-8", "replace"),
            bfloat16=bfloat16,
            ids_only=options.ids_only,
        )


def fields_of(schema: pa.Schema, source: str, roles: Sequence[str], options: ReadOptions) -> dict[str, pa.Field | None]:
    """Return the fields that play these roles. Raises InputError if one that is needed is missing."""
    roles = [role for role in roles if role != "time" or options.needs_time]
    fields = {role: field_of(schema, source, role, options.columns.get(role)) for role in roles}
    missing = [role for role in roles if role in (*REQUIRED, "time") and fields[role] is None]
    if missing:
        raise missing_roles(schema, source, missing, options.columns)
    return fields


def check_types(fields: Mapping[str, pa.Field | None], source: str, bfloat16: bool = False) -> None:
    """Raise InputError for a field whose type does not fit its role. bfloat16 : the gradient is declared to be that"""
    for role, field in fields.items():
        if field is not None and not fits(role, field.type, bfloat16):
            hint = (hashing_hint(field.type) if role == "id" else "") or type_hint(field.type)
            raise InputError(f"expected {WANTED[role]}, got {field.type}{hint}", source=source, column=field.name)


def field_of(schema: pa.Schema, source: str, role: str, name: str | None) -> pa.Field | None:
    """Return the field that plays a role, by the default name or ``name``; None if the default one is absent."""
    column = name if name is not None else role
    indices = schema.get_all_field_indices(column)
    if len(indices) == 1:
        return schema.field(indices[0])
    if len(indices) > 1:
        raise InputError(f"{len(indices)} columns have this name; keep one", source=source, column=column)
    if name is None:
        return None
    near, has = nearest(column, schema.names), ", ".join(schema.names) or "no columns"
    hint = f"; did you mean --column {role}={near}?" if near is not None else ""
    raise InputError(f"no column '{column}' for the role '{role}'{hint} (the stream has: {has})", source=source)


def _declares_bfloat16(gradient: pa.Field) -> bool:
    """Return whether its values are uint16 and the field, or that of its values, declares them bfloat16."""
    storage = storage_type(gradient.type)
    if not is_list(storage) or storage.value_type != pa.uint16():
        return False
    return any((f.metadata or {}).get(b"dtype") == b"bfloat16" for f in (gradient, storage.value_field))
