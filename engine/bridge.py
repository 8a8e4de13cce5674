"""An import path that stays, of ``penstock.rows.bridge``."""

from penstock.rows.bridge import __all__ as __all__
from penstock.rows.bridge import __getattr__ as __getattr__
