"""The tables' door to jax: layout, compiled programs, dispatch, and tables inside a user's jitted step.

The public names load on first use, and jax with them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.rows.bridge.functional_table import Table, Uses, apply, gather

__all__ = ["Table", "Uses", "apply", "gather"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'penstock.bridge' has no attribute '{name}'")
    from penstock.rows.bridge import functional_table

    return getattr(functional_table, name)
