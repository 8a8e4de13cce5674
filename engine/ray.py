"""Jobs of many machines on a Ray cluster (docs/ray.md)."""

from penstock.contrib.ray.job import Job

__all__ = ["Job"]
