"""Integrations: each is optional, and known to the rest by the names in ``base/integrations.py`` only."""
