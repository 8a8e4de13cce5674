"""The client of ``penstock serve``, and what it receives."""

from penstock.model.version import LookupResult
from penstock.serving.flight.answers import Delta, Status, TableAt
from penstock.serving.flight.client import Client, connect
from penstock.serving.flight.messages import Ack
from penstock.serving.flight.producer import Producer

__all__ = ["Ack", "Client", "Delta", "LookupResult", "Producer", "Status", "TableAt", "connect"]
