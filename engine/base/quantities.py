"""Counts and sizes as text."""

from __future__ import annotations


def count(number: float) -> str:
    """Return 1234567 as '1,234,567'."""
    return f"{number:,.0f}"


def several(number: int, noun: str) -> str:
    """Return '1 table', '2 tables'."""
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def size_text(num_bytes: int) -> str:
    """Return 1234567 bytes as '1.2 MB'."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if num_bytes >= 1000**power:
            return f"{num_bytes / 1000**power:,.1f} {unit}"
    return several(num_bytes, "byte")
