"""Flight streams as sources: what a producer puts, and what is fetched from a service by its address.

A batch's app_metadata says where its frame ends. gRPC tells a stream that ended from one that was
cut: there is no end marker to look for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.flight as flight

from penstock.errors import InputError
from penstock.io.flight_connection import Address, dial
from penstock.io.flight_messages import flight_errors, from_flight, read_words
from penstock.io.parts import Batch, Batches, Part, arrow_errors
from penstock.io.sources import Parts, Source


class Chunk(NamedTuple):
    """A batch as it came, whether it ends its frame, and what Batch says of ``copied``."""

    data: pa.RecordBatch | None
    ends: bool
    copied: Callable[[], pa.RecordBatch] | None = None


def flight_source(uri: str, token: str | None = None) -> Source:
    """A flight by its address, ``grpc://HOST:PORT/PATH``: all its endpoints, in order."""
    address = Address.of(uri)
    if not address.path:
        raise InputError("say which flight: grpc://HOST:PORT/PATH", source=uri)

    def parts() -> Parts:
        client, options = dial(address, token)
        with client:
            try:
                with flight_errors(uri):
                    info = client.get_flight_info(flight.FlightDescriptor.for_path(*address.path), options)
                for number, endpoint in enumerate(info.endpoints):
                    name = f"{uri}#{number}" if len(info.endpoints) > 1 else uri
                    yield from _endpoint(client, options, endpoint, name, token)
            except (ConnectionError, flight.FlightError) as error:
                raise InputError(str(error).removeprefix(f"{uri}: "), source=uri) from error

    return Source(uri, parts)


def _endpoint(
    client: flight.FlightClient,
    options: flight.FlightCallOptions,
    endpoint: flight.FlightEndpoint,
    name: str,
    token: str | None,
) -> Generator[Part, None, None]:
    """From where the endpoint lies; without a location that is the service itself."""
    if not endpoint.locations:
        with flight_errors(name):
            reader = client.do_get(endpoint.ticket, options)
        yield chunks_part(reader, name)
        return
    elsewhere, options = dial(Address.of(endpoint.locations[0].uri.decode()), token)
    with elsewhere:
        with flight_errors(name):
            reader = elsewhere.do_get(endpoint.ticket, options)
        yield chunks_part(reader, name)


def chunks_part(reader: Any, name: str, ends_are_told: bool = False) -> Part:
    """What is left of a Flight reader, or of what has a ``schema`` and a ``read_chunk`` that gives Chunks.

    ends_are_told : see Part
    """
    with flight_errors(name), arrow_errors("no stream of record batches", name):
        schema = reader.schema
    empty = pa.RecordBatch.from_pylist([], schema)

    def batches(columns: list[str]) -> Batches:
        index = first_row = 0
        while (chunk := _next_chunk(reader, name, index)) is not None:
            data = empty if chunk.data is None else chunk.data
            yield Batch(data, index, first_row, chunk.ends, chunk.copied)
            index, first_row = index + 1, first_row + data.num_rows

    return Part(name, schema, True, batches, container="Flight stream", ends_are_told=ends_are_told)


def _next_chunk(reader: Any, name: str, index: int) -> Chunk | None:
    try:
        with arrow_errors("the stream broke off", name, index):
            chunk = reader.read_chunk()
    except StopIteration:
        return None
    except flight.FlightError as error:
        raise InputError(f"the stream broke off: {from_flight(error, name)}", source=name, batch=index) from error
    return chunk if isinstance(chunk, Chunk) else Chunk(chunk.data, read_words(chunk.app_metadata).ends)
