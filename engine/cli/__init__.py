"""The command line, with one module per command. It may import every package; no package imports it."""

from penstock.cli.main import main

__all__ = ["main"]
