"""The command line: one file per command. May import every room; nothing imports it."""

from penstock.cli.main import main

__all__ = ["main"]
