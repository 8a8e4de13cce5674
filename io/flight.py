"""An import path that stays, of ``penstock.serving.flight``."""

from penstock.serving.flight import Ack, Client, Delta, LookupResult, Producer, Status, TableAt, connect

__all__ = ["Ack", "Client", "Delta", "LookupResult", "Producer", "Status", "TableAt", "connect"]
