"""An import path that stays, of ``penstock.contrib.accumulators``."""

from penstock.contrib.accumulators import ConditionalAccumulator, SparseConditionalAccumulator, SparseGradient

__all__ = ["ConditionalAccumulator", "SparseConditionalAccumulator", "SparseGradient"]
