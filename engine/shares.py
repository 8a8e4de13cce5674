"""An import path that stays, of ``penstock.contrib.shares``."""

from penstock.contrib.shares import *  # noqa: F403
from penstock.contrib.shares import __all__ as __all__
