"""An import path that stays, of ``penstock.api.engine``."""

from penstock.api.engine import Engine

__all__ = ["Engine"]
