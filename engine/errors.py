"""An import path that stays, of ``penstock.base.errors``."""

from penstock.base.errors import *  # noqa: F403
from penstock.base.errors import __all__ as __all__
