"""Jobs of many machines on a Ray cluster (docs/ray.md)."""

from penstock.shares.ray.job import Job

__all__ = ["Job"]
