"""An import path that stays, of ``penstock.serving.followers.follower``."""

from penstock.serving.followers.follower import Follower, Progress

__all__ = ["Follower", "Progress"]
