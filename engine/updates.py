"""An import path that stays, of ``penstock.model.updates``."""

from penstock.model.updates import *  # noqa: F403
from penstock.model.updates import __all__ as __all__
