"""Flights as a kind of source; a run that reads none loads no gRPC."""

from __future__ import annotations

from penstock.io.flight_errors import ERRORS
from penstock.io.sources.batch import Source
from penstock.io.sources.source_kinds import SourceKind


class FlightKind(SourceKind):
    """The flights of a service."""

    read_once = "a live stream"

    def open(self, uri: str, patience_s: float) -> list[Source]:
        from penstock.serving.flight.source import flight_source

        return [flight_source(uri)]


SOURCE = FlightKind(
    title="Arrow Flight",
    form="grpc://HOST:PORT/PATH",
    schemes=("grpc://", "grpc+tcp://", "grpc+tls://"),
    example="grpc://127.0.0.1:8900/monday",
    errors=ERRORS,
    unit="a batch, or the rows of a step",
)
