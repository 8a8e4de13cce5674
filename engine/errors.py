"""An import path that stays, of ``penstock.base.errors``."""

from penstock.base.errors import (
    CancelledError,
    CapacityError,
    ConfigError,
    DeltasGoneError,
    InputError,
    PeerError,
    PenstockError,
    ReadTimeoutError,
    ServiceError,
    ServiceTimeoutError,
    StateError,
    TakeTimeoutError,
    TruncatedInputError,
    UsageError,
    UsageTypeError,
)

__all__ = [
    "CancelledError",
    "CapacityError",
    "ConfigError",
    "DeltasGoneError",
    "InputError",
    "PeerError",
    "PenstockError",
    "ReadTimeoutError",
    "ServiceError",
    "ServiceTimeoutError",
    "StateError",
    "TakeTimeoutError",
    "TruncatedInputError",
    "UsageError",
    "UsageTypeError",
]
