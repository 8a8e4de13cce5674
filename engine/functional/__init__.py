"""An import path that stays, of ``penstock.contrib.functional``."""

from penstock.contrib.functional import *  # noqa: F403
from penstock.contrib.functional import __all__ as __all__
