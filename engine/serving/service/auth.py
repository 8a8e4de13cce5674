"""Access to the service: addresses, certificates, tokens with their roles, and the number of concurrent calls.

A service without TLS or tokens on an address that other hosts can reach requires an explicit option.
"""

from __future__ import annotations

import hmac
import os
import ssl
import threading
import time
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow.flight as flight

from penstock.base.errors import ConfigError, UsageError
from penstock.base.events import FrequentEvent
from penstock.serving.flight.connection import Address
from penstock.serving.service.connections import Connections


class Right(Enum):
    """What a call needs: to send gradients; to read tables, deltas, rows, status and metrics; or to operate."""

    PUT = "put"
    READ = "read"
    OPERATE = "operate"


class Role(Enum):
    """The rights of a token, by the word before it in the file."""

    PRODUCER = frozenset({Right.PUT})
    READER = frozenset({Right.READ})
    OPERATOR = frozenset(Right)

    @property
    def word(self) -> str:
        return self.name.lower()


Tokens = Mapping[bytes, Role]
Certificates = list[tuple[bytes, bytes]]  # (certificate, key), as PEM


def check_protected(address: Address, has_token: bool, insecure: bool) -> None:
    """Raise UsageError if other hosts could reach the service without TLS or without a token. insecure : allow that"""
    if insecure or address.is_loopback:
        return
    lacks = [
        *([] if address.tls else ["encryption (grpc+tls:// with --tls-cert and --tls-key)"]),
        *([] if has_token else ["a token (--token-file)"]),
    ]
    if lacks:
        raise UsageError(
            f"--listen {address.uri}: others can reach this address, and it lacks {' and '.join(lacks)}; "
            "give it, listen on 127.0.0.1, or say --insecure"
        )


def certificates(address: Address, cert: Path | None, key: Path | None) -> Certificates:
    """Return [(certificate, key)] for gRPC, [] without TLS. Raises UsageError if scheme and files do not match."""
    if not address.tls:
        if cert is not None or key is not None:
            raise UsageError(f"--tls-cert and --tls-key go with --listen grpc+tls://…, not {address.uri}")
        return []
    if cert is None or key is None:
        raise UsageError(f"--listen {address.uri}: give --tls-cert FILE and --tls-key FILE")
    pair = (_read(cert, "--tls-cert"), _read(key, "--tls-key"))
    try:  # gRPC would only report that it cannot listen
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise UsageError(
            f"--tls-cert {cert}, --tls-key {key}: not a PEM certificate with its key, unencrypted ({reason})"
        ) from None
    return [pair]


def tokens_of(file: Path | None) -> Tokens:
    """Return the tokens in a file with their roles; none without a file.

    Each line has a role and a token, or a token alone, which is an operator's. Raises UsageError, and ConfigError for a
    word that is no role. Messages contain no word of the file: it may be a token.
    """
    if file is None:
        return {}
    tokens: dict[bytes, Role] = {}
    roles = {role.word.encode(): role for role in Role}
    for number, line in enumerate(_read(file, "--token-file").removeprefix(BOM_UTF8).splitlines(), start=1):
        *words, token = line.split() or [b""]
        place = f"--token-file {file}, line {number}"
        if not token:
            continue
        if len(words) > 1 or not token.isascii():
            raise UsageError(f"{place}: expected ROLE TOKEN, or a token alone, ASCII without spaces")
        role = roles.get(words[0]) if words else Role.OPERATOR
        if role is None:
            raise ConfigError(f"{place}: the first word is no role; expected {', '.join(role.word for role in Role)}")
        if tokens.setdefault(token, role) is not role:
            raise UsageError(f"{place}: an earlier line gives this token another role")
    if not tokens:
        raise UsageError(f"--token-file {file}: expected one token per line, ASCII without spaces")
    return tokens


def _read(file: Path, flag: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} {os.fspath(file)}: cannot be read ({error.strerror})") from None


def role_of(tokens: Tokens, authorization: bytes) -> Role | None:
    """Return the role of the token in a value of the header ``authorization``; None: it contains none of the tokens.

    Compares every token, in a time that does not depend on how much of it matches.
    """
    matches = [hmac.compare_digest(authorization, b"Bearer " + token) for token in tokens]
    return next((role for role, matched in zip(tokens.values(), matches, strict=True) if matched), None)


def may_read(tokens: Tokens, authorization: bytes) -> bool:
    """Return whether a value of the header ``authorization`` contains a token whose role may read."""
    role = role_of(tokens, authorization)
    return role is not None and Right.READ in role.value


# The name of CallAdmission among the middleware of a server.
ADMISSION = "admission"
# Calls beyond --max-calls that only actions may use, such as status and drain.
OPERATOR_CALLS = 8
# At the end of the service: how often to look whether the calls in progress are idle.
_LOOK_S = 0.01


class CallAdmission(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Checks the token of every call, and limits the number of concurrent calls.

    tokens : each of them admits the calls of its role; none: every call is admitted, as an operator's
    connections : counts the admitted calls by connection
    """

    def __init__(self, tokens: Tokens, max_calls: int, connections: Connections) -> None:
        super().__init__()
        self.connections = connections
        self._tokens = dict(tokens)
        self._max_calls = max_calls
        self._changed = threading.Condition()
        self._calls: set[AdmittedCall] = set()
        self.num_refused = 0
        self._refused_event = FrequentEvent("call_refused")

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, list[Any]]) -> AdmittedCall:
        with self._changed:
            role = self._role(_authorizations(headers))
            if role is None:
                raise self.refused(flight.FlightUnauthenticatedError("the token is missing or wrong"))
            # Health checks and operators get in, however many producers and readers there are: an action is short.
            kept = OPERATOR_CALLS if info.method == flight.FlightMethod.DO_ACTION else 0
            if self.num_calls >= self._max_calls + kept:
                problem = f"busy with {self.num_calls} calls (--max-calls); try again"
                raise self.refused(flight.FlightUnavailableError(problem))
            call = AdmittedCall(self, role, _authorizations(headers))
            self._calls.add(call)
        return call

    def replace_tokens(self, tokens: Tokens) -> None:
        """Admit calls by other tokens from now on; those in progress end if their tokens have not the same role."""
        with self._changed:
            self._tokens = dict(tokens)
            for call in self._calls:
                if self._role(call.authorizations) is not call.role:
                    call.end_within(0)

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until all calls in progress are idle, and return whether that happened within ``timeout_s``."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while any(call.idle_since_s is None for call in self._calls):
                if time.monotonic() >= until_s:
                    return False
                self._changed.wait(_LOOK_S)
            return True

    def call_ended(self, call: AdmittedCall) -> None:
        with self._changed:
            self._calls.discard(call)
            self._changed.notify_all()

    def refused(self, error: flight.FlightError, peer: str | None = None) -> flight.FlightError:
        """Count and log a refused call. Return its error. peer : None: not known yet"""
        with self._changed:
            self.num_refused += 1
        self._refused_event.report(peer=peer, error=str(error))
        return error

    def _role(self, authorizations: Sequence[bytes]) -> Role | None:
        if not self._tokens:
            return Role.OPERATOR
        return next((role for value in authorizations if (role := role_of(self._tokens, value)) is not None), None)


def _authorizations(headers: Mapping[str, list[Any]]) -> list[bytes]:
    return [value.encode() if isinstance(value, str) else value for value in headers.get("authorization", [])]


class AdmittedCall(flight.ServerMiddleware):  # type: ignore[misc]
    """One admitted call, until it completes.

    idle_since_s : when it began to wait for a request, by the monotonic clock; None: it does not wait. While it does,
        its connection may be closed, and the end of the service does not wait for it. Set without a lock: it changes
        twice with each request
    silent_until_s : when its connection is closed unless a message arrives, by the same clock; None: it expects none
    """

    def __init__(self, admission: CallAdmission, role: Role, authorizations: Sequence[bytes]) -> None:
        super().__init__()
        self._admission, self.role, self.authorizations = admission, role, authorizations
        self._peer: str | None = None
        self.idle_since_s: float | None = None
        self.silent_until_s: float | None = None
        self._ends_at_s = float("inf")

    @property
    def ends_at_s(self) -> float:
        """Return when its connection is closed, by the monotonic clock."""
        return self._ends_at_s if (until_s := self.silent_until_s) is None else min(self._ends_at_s, until_s)

    def end_within(self, seconds: float) -> None:
        """Close its connection after so many seconds."""
        self._ends_at_s = min(self._ends_at_s, time.monotonic() + seconds)

    def set_peer(self, peer: str) -> None:
        """Set the peer of the call's connection, which ``start_call`` does not receive."""
        self._admission.connections.begin_call(peer, self)
        self._peer = peer

    def check(self, right: Right) -> None:
        """Raise FlightUnauthorizedError, PERMISSION_DENIED for the caller, if its role lacks a right."""
        if right not in self.role.value:
            roles = " or ".join(role.word for role in Role if right in role.value)
            article = "an" if roles.startswith("o") else "a"
            problem = f"the token is a {self.role.word}'s, and this call needs {article} {roles}'s"
            raise self._admission.refused(flight.FlightUnauthorizedError(problem), self._peer)

    def call_completed(self, exception: BaseException | None) -> None:
        if self._peer is not None:
            self._admission.connections.end_call(self._peer, self)
        self._admission.call_ended(self)
