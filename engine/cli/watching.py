"""What commands know of metrics and of the pages for browsers, which are an integration."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from penstock.base.integrations import PAGES
from penstock.io.registry import Library


def pages(name: str) -> Any:
    """Return a module of the pages."""
    return import_module(PAGES[name])


def watching(args: argparse.Namespace, watched: Any, access: Any = None) -> Any:
    """Return the context that monitors an engine, a job or a replica as the flags request.

    access : to the pages that other machines reach; None: they answer everybody
    """
    return pages("monitoring").Watching(args, watched, access)


def page_addresses(args: argparse.Namespace) -> dict[str, tuple[str, int]]:
    """Return flag → (host, port) of ``--ui`` and ``--metrics``, if they are given. Raises UsageError."""
    given = {flag: address for flag in ("ui", "metrics") if (address := getattr(args, flag))}
    return {flag: pages("http_server").address_of(address, f"--{flag}") for flag, address in given.items()}


def check_library(args: argparse.Namespace) -> None:
    """Raise UsageError if a flag needs prometheus-client, and it is not installed."""
    for flag in ("ui", "metrics", "metrics_file", "report"):
        if getattr(args, flag):
            Library("prometheus_client", "metrics").load(f"--{flag.replace('_', '-')}")
