"""Stores that follow the tables of a service: ``penstock follow`` (docs/follow.md)."""
