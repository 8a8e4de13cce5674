"""The command line, a module per command. It knows integrations only by the names in ``base/integrations.py``."""

from penstock.cli.main import main

__all__ = ["main"]
