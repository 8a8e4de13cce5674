"""What errors of libraries mean: which end a command at once, with which exit code, and which are retried.

Each connector declares one table, which its page shows (docs/tables.py) and a test executes.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import penstock.io.proxies as proxies
from penstock.base.errors import InputError, PenstockError, StateError, UsageError, short, without_credentials

# Appended to an error that no row lists. It is retried: a wrong end costs more than a wait that is logged.
UNLISTED = "(not in the table of errors: it is retried, and may not heal)"
USAGE, INPUT = 2, 3
_KINDS: dict[int, type[PenstockError]] = {USAGE: UsageError, INPUT: InputError, 5: StateError}
# How many causes of an error are considered: libraries wrap those of the operating system.
_MOST_CAUSES = 4


class ErrorRow(NamedTuple):
    """Errors that mean the same.

    meaning : what has happened, for the page
    code : the exit code of the command that such an error ends; None: it heals, and is retried
    names : of classes, of ``errno``, or the library's codes
    pattern : regular expression that the texts of such errors, or of their causes, contain
    advice : what to do, which ends the message
    """

    meaning: str
    code: int | None = None
    names: str = ""
    pattern: str = ""
    advice: str = ""

    def lists(self, names: set[str], text: str) -> bool:
        return not names.isdisjoint(self.names.split()) or bool(
            self.pattern and re.search(self.pattern, text, re.IGNORECASE)
        )


def causes_of(error: Any) -> Iterator[Any]:
    """Yield an error and its causes."""
    cause = error
    for _ in range(_MOST_CAUSES):
        if cause is not None:
            yield cause
            cause = getattr(cause, "__cause__", None) or getattr(cause, "__context__", None)


def names_of(error: BaseException) -> Iterator[str]:
    """Yield the names of the classes of an error and of its causes, and of their ``errno``."""
    for cause in causes_of(error):
        yield from (kind.__name__ for kind in type(cause).__mro__[:-3])  # not object, BaseException and Exception
        if isinstance(cause, OSError) and (number := cause.errno) is not None and number in errno.errorcode:
            yield errno.errorcode[number]


def text_of(error: BaseException) -> str:
    """Return the text of an error as one line, without the colours of some libraries."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split()) or type(error).__name__


class ErrorTable:
    """The errors of one connector.

    rows : the first one that lists an error counts
    names, text : given an error, return its names, and its text without contents of commands and messages
    uses_proxies : whether the library connects through a proxy that the environment names
    """

    def __init__(
        self,
        *rows: ErrorRow,
        names: Callable[[BaseException], Iterator[str]] = names_of,
        text: Callable[[BaseException], str] = text_of,
        uses_proxies: bool = False,
    ) -> None:
        self.rows, self._names, self._text, self._uses_proxies = rows, names, text, uses_proxies

    def row(self, error: BaseException) -> ErrorRow | None:
        """Return the row that lists an error; None: no row does."""
        names, text = set(self._names(error)), "; ".join(map(self._text, causes_of(error)))
        return next((row for row in self.rows if row.lists(names, text)), None)

    def is_final(self, error: BaseException) -> bool:
        row = self.row(error)
        return row is not None and row.code is not None

    def is_refusal(self, error: BaseException) -> bool:
        """Return whether an error is about the address, the rights or the settings."""
        row = self.row(error)
        return row is not None and row.code == USAGE

    def converted(self, error: BaseException, place: str, retried: Callable[[str], Exception]) -> Exception:
        """Return the error that a connector raises for one of its library.

        place : what failed, for the message; retried : returns the error that is retried, given its text
        """
        row, text = self.row(error), short(without_credentials(self._text(error)))
        place = without_credentials(place)
        if row is None:
            text = f"{text} {UNLISTED}"
        elif row.advice:
            text = f"{text}; {row.advice}"
        if row is not None and row.code is not None:
            kind = _KINDS[row.code]
            return InputError(text, source=place) if kind is InputError else kind(f"{place}: {text}")
        return retried(f"{text}{proxies.hint()}" if self._uses_proxies else text)


# ---- rows of several connectors


def untrusted(setting: str) -> ErrorRow:
    """Return the row of a certificate that is not trusted. setting : what names those to trust"""
    return CERTIFICATE._replace(
        advice=f"give the certificates to trust ({setting}), and a name that the certificate has"
    )


CERTIFICATE = ErrorRow(
    "the certificate of the server is not trusted, or is of another name",
    2,
    "SSLCertVerificationError",
    r"certificate.?verify.?failed|certificate verification|invalid peer certificate|certificate has expired"
    r"|unable to get (local )?issuer|self.signed certificate|hostname mismatch|UnknownIssuer|NotValidForName",
    "give the certificates to trust, and a name that the certificate has",
)
NO_TLS = ErrorRow(
    "the server does not use TLS at this port",
    2,
    "",
    r"wrong.version.number|record.layer.failure|packet.length.too.long|InvalidContentType|corrupt message",
    "use the address without TLS, or the port with it",
)
HANDSHAKE = ErrorRow(
    "a TLS handshake is not answered",
    None,
    "",
    r"handshake operation timed out|handshake.*timed out|EOF occurred in violation of protocol",
    "does the server use TLS at this port?",
)
UNREACHABLE = ErrorRow(
    "the server cannot be reached, does not answer in time, or has closed the connection",
    None,
    "ECONNREFUSED ECONNRESET ECONNABORTED EPIPE EHOSTUNREACH ENETUNREACH ENETDOWN ETIMEDOUT EADDRNOTAVAIL gaierror "
    "TimeoutError ConnectionError ConnectionRefusedError ConnectionResetError BrokenPipeError",
    r"connection (refused|reset|closed|aborted)|timed? ?out|name or service not known|dns error|could not resolve"
    r"|temporary failure in name resolution|error sending request|broken pipe|no route to host|NETWORK_CONNECTION"
    r"|could not connect|network is unreachable",
)
# Before the number of a status of HTTP: a text may have other numbers.
_STATUS = r"(status|code|http|error)[\s:=(]*(code)?[\s:=]*"
FILES = (
    ErrorRow(
        "the permissions of a file or a folder, or a file system that is read-only",
        2,
        "EACCES EPERM EROFS",
        r"permission denied|read-only file system|operation not permitted",
        "check the owner and the permissions",
    ),
    ErrorRow(
        "the path cannot exist: a part of it is a file, it is a folder, or it is too long",
        2,
        "ENOTDIR EISDIR ENAMETOOLONG ELOOP",
        r"not a directory|is a directory|file name too long",
        "give another path",
    ),
    ErrorRow(
        "the file system has no locks or no memory maps, as some of networks",
        2,
        "ENOLCK ENOTSUP EOPNOTSUPP ENODEV ENOSYS",
        r"no locks available|operation not supported",
        "use a local file system",
    ),
    ErrorRow(
        "the disk or the quota is full", None, "ENOSPC EDQUOT", r"no space left|quota exceeded", "free some space"
    ),
    ErrorRow(
        "the disk fails, or this machine has no more memory, files or processes",
        None,
        "EIO ESTALE EMFILE ENFILE ENOMEM EAGAIN EBUSY EINTR",
        r"input/output error|stale file handle|too many open files|cannot allocate memory",
    ),
)
OBJECT_STORES = (
    CERTIFICATE,
    NO_TLS,
    ErrorRow(
        "the credentials have expired, or the clock of this machine is wrong",
        2,
        "",
        r"ExpiredToken|token (has )?expired|InvalidToken|RequestTimeTooSkewed|RequestExpired",
        "renew the credentials in the environment, and start again",
    ),
    ErrorRow(
        "the credentials are missing, wrong, or do not allow it (401, 403)",
        2,
        "",
        r"access.?denied|forbidden|unauthori[sz]ed|unauthenticated|InvalidAccessKeyId|SignatureDoesNotMatch"
        rf"|{_STATUS}40[13]\b"
        r"|AWS Error ACCESS_DENIED|(no|unable to locate|could not find|not load) .{0,20}credentials"
        r"|credentials? provider",
        "check the credentials in the environment",
    ),
    ErrorRow(
        "the bucket is in another region",
        2,
        "",
        r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|wrong region"
        rf"|{_STATUS}301\b|region .{{0,40}} is wrong|the bucket is located in",
        "set the region of the bucket (AWS_REGION)",
    ),
    ErrorRow("there is no such bucket", 2, "", r"NoSuchBucket|NO_SUCH_BUCKET|InvalidBucketName", "check the address"),
    ErrorRow(
        "the store limits its requests, or fails (429, 500, 502, 503, 504)",
        None,
        "",
        r"slow.?down|too many requests|service.?unavailable|internal.?(server.?)?error|bad gateway|gateway timeout"
        rf"|RequestTimeout|{_STATUS}(429|50[0234])\b",
    ),
)
MISSING = ErrorRow(
    "what is named does not exist (404)",
    3,
    "TableNotFoundError NoSuchTableError NoSuchNamespaceError",
    rf"not.?found|no such|does not exist|not a delta table|{_STATUS}404\b",
)
# Of object stores that are read by pyarrow. Its client retries what heals, and a run then ends with 3.
OBJECT_STORE_ERRORS = ErrorTable(*OBJECT_STORES, MISSING, UNREACHABLE, uses_proxies=True)
