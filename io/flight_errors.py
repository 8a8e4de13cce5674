"""The errors of Flight services, by the names of pyarrow's classes: this module loads no gRPC."""

from __future__ import annotations

from penstock.io.error_tables import ErrorRow, ErrorTable

ERRORS = ErrorTable(
    ErrorRow(
        "the token is missing or wrong, or its role lacks the right",
        2,
        "FlightUnauthenticatedError FlightUnauthorizedError",
        advice="set PENSTOCK_FLIGHT_TOKEN to a token of the service",
    ),
    ErrorRow(
        "the certificate of the service is not trusted or is of another name, or the service has none",
        2,
        "",
        "certificate.?verify.?failed|is not in peer certificate|wrong.version.number",
        "set PENSTOCK_FLIGHT_ROOTS to a file with the certificates to trust, and use a name that they certify",
    ),
    ErrorRow(
        "the server does not know the call",
        3,
        "ArrowNotImplementedError",
        advice="is it the address of penstock serve?",
    ),
    ErrorRow(
        "a message is larger than the server, or a proxy before it, accepts",
        2,
        "",
        r"(message|frame) .{0,20}larger than max|message size .{0,40}exceeds",
        "raise that limit, or send smaller frames",
    ),
    ErrorRow("the server, or a proxy before it, limits requests", None, "", "resource exhausted error"),
    ErrorRow(
        "the service cannot be reached, is full (`--max-calls`), ends, or does not answer in time",
        None,
        "FlightUnavailableError FlightCancelledError FlightTimedOutError",
    ),
)
