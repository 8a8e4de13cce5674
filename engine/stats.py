"""An import path that stays, of ``penstock.model.stats``."""

from penstock.model.stats import Counters, Report, TableReport

__all__ = ["Counters", "Report", "TableReport"]
