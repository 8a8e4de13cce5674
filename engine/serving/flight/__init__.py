"""The client of ``penstock serve``, and what it receives."""

from penstock.serving.flight.answers import Delta, TableAt
from penstock.serving.flight.client import Client, connect

__all__ = ["Client", "Delta", "TableAt", "connect"]
