"""The engine's only door to jax: layout, compiled programs, dispatch, and tables inside a user's jitted step."""

from penstock.bridge.functional_table import Table, Uses, apply, gather

__all__ = ["Table", "Uses", "apply", "gather"]
