"""Jobs of many machines: Ray places readers and owners, carries blocks between them, and restarts what dies."""

from penstock.contrib.ray.job import Job

__all__ = ["Job"]
