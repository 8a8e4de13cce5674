"""An import path that stays, of ``penstock.contrib.pages.metrics``."""

from penstock.contrib.pages.metrics import Metrics

__all__ = ["Metrics"]
