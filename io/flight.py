"""An import path that stays, of ``penstock.serving.flight``."""

from penstock.model.version import LookupResult
from penstock.serving.flight import Client, Delta, TableAt, connect
from penstock.serving.flight.messages import Ack
from penstock.serving.flight.producer import Producer

__all__ = ["Ack", "Client", "Delta", "LookupResult", "Producer", "TableAt", "connect"]
