"""Checkpoints: tables, slots, gate and position in one atomic commit. docs/formats.md describes the format."""
