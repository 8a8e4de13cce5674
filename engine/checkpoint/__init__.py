"""Checkpoints: tables, slots, gate and position in one atomic commit. docs/checkpoints.md describes the format."""
