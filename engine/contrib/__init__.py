"""Integrations: each is optional, and known to the rest through a registry only."""
