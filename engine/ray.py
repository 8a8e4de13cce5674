"""An import path that stays, of ``penstock.contrib.ray.job``."""

from penstock.contrib.ray.job import Job

__all__ = ["Job"]
