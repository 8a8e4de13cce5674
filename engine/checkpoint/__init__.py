"""Checkpoints: tables, slots, gate and position in one atomic commit. docs/checkpoints.md is the format."""
