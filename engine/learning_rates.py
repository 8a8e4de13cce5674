"""An import path that stays, of ``penstock.model.learning_rates``."""

from penstock.model.learning_rates import LearningRates, Rates

__all__ = ["LearningRates", "Rates"]
