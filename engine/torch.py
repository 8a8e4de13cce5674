"""An import path that stays, of ``penstock.contrib.torch``."""

from penstock.contrib.torch import *  # noqa: F403
from penstock.contrib.torch import __all__ as __all__
