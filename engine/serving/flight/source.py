"""Flight streams as sources: a producer's put, and a flight that is fetched from a service by its address.

The app_metadata of a batch marks the end of its frame. gRPC distinguishes a stream that ended from one that was
interrupted, so there is no end marker to check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.flight as flight

from penstock.base.errors import InputError, ServiceError, UsageError
from penstock.io.error_tables import USAGE
from penstock.io.flight_errors import ERRORS
from penstock.io.sources.batch import Batch, Batches, Part, Parts, Source, arrow_errors
from penstock.serving.flight.connection import Address, dial
from penstock.serving.flight.messages import flight_errors, from_flight, read_metadata


class Chunk(NamedTuple):
    """A batch as received, and whether it ends its frame."""

    data: pa.RecordBatch | None
    ends: bool
    step: int | None = None


def flight_source(uri: str, token: str | None = None) -> Source:
    """Open a flight by its address, ``grpc://HOST:PORT/PATH``: all its endpoints, in order.

    token : None: PENSTOCK_FLIGHT_TOKEN of the environment, if set. An endpoint may name another location: the
        token is sent there only if the host is the same, and only over TLS if the address is TLS
    """
    address = Address.of(uri)
    if not address.path:
        raise InputError("name a flight: grpc://HOST:PORT/PATH", source=uri)

    def parts() -> Parts:
        client, options = dial(address, token)
        with client:
            try:
                with flight_errors(uri):
                    info = client.get_flight_info(flight.FlightDescriptor.for_path(*address.path), options)
                for number, endpoint in enumerate(info.endpoints):
                    name = f"{uri}#{number}" if len(info.endpoints) > 1 else uri
                    if endpoint.locations:
                        location = Address.of(endpoint.locations[0].uri.decode())
                        yield from _part_elsewhere(address, location, endpoint.ticket, name, token)
                    else:
                        yield _part(client, options, endpoint.ticket, name)
            except (ConnectionError, flight.FlightError) as error:
                if (row := ERRORS.row(error.__cause__ or error)) is not None and row.code == USAGE:
                    raise UsageError(f"{error}; {row.advice}") from error
                raise InputError(str(error).removeprefix(f"{uri}: "), source=uri) from error

    return Source(uri, parts)


def _part_elsewhere(asked: Address, location: Address, ticket: Any, name: str, token: str | None) -> Parts:
    """Read from the location that an endpoint names."""
    is_trusted = asked.may_pass_token_to(location)
    client, options = dial(location, token if is_trusted else "")
    with client:
        try:
            part = _part(client, options, ticket, name)
        except ServiceError as error:
            if is_trusted:
                raise
            raise InputError(
                f"{str(error).removeprefix(f'{name}: ')}; {location.uri} was sent no token: it goes only to the host "
                f"that was asked, {asked.host}{', over TLS' if asked.tls else ''}",
                source=name,
            ) from error
        yield part


def _part(client: flight.FlightClient, options: flight.FlightCallOptions, ticket: Any, name: str) -> Part:
    with flight_errors(name):
        reader = client.do_get(ticket, options)
    return chunks_part(reader, name)


def chunks_part(
    reader: Any, name: str, read: Callable[[list[str]], Chunk] | None = None, ends_are_marked: bool = False
) -> Part:
    """Return the rest of a Flight reader.

    read : given the columns in use, returns the next chunk; None: as the reader returns it
    ends_are_marked : see Part
    """
    with flight_errors(name), arrow_errors("no stream of record batches", name):
        schema = reader.schema
    empty = pa.RecordBatch.from_arrays([pa.nulls(0, column.type) for column in schema], schema=schema)

    def unchecked(columns: list[str]) -> Chunk:
        chunk = reader.read_chunk()
        metadata = read_metadata(chunk.app_metadata)
        return Chunk(chunk.data, metadata.ends, metadata.step)

    def batches(columns: list[str]) -> Batches:
        index = first_row = 0
        while (chunk := _next_chunk(read or unchecked, columns, name, index)) is not None:
            data = empty if chunk.data is None else chunk.data
            yield Batch(name, data, index, first_row, chunk.ends, chunk.step)
            index, first_row = index + 1, first_row + data.num_rows

    return Part(name, schema, True, batches, container="Flight stream", ends_are_marked=ends_are_marked)


def _next_chunk(read: Callable[[list[str]], Chunk], columns: list[str], name: str, index: int) -> Chunk | None:
    try:
        with arrow_errors("the stream broke off", name, index):
            return read(columns)
    except StopIteration:
        return None
    except flight.FlightError as error:
        raise InputError(f"the stream broke off: {from_flight(error, name)}", source=name, batch=index) from error
