"""An import path that stays, of ``penstock.rows.bridge``."""

from typing import TYPE_CHECKING

from penstock.rows.bridge import __all__ as __all__
from penstock.rows.bridge import __getattr__ as __getattr__

if TYPE_CHECKING:
    from penstock.rows.bridge import Table, Uses, apply, gather  # noqa: F401
