"""An import path that stays, of ``penstock.contrib.dataflow``."""

from penstock.contrib.dataflow import BlockStage, StageFunction, stage_fn

__all__ = ["BlockStage", "StageFunction", "stage_fn"]
