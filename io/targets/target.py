"""An import path that stays, of ``penstock.serving.followers.target``."""

from penstock.serving.followers.target import FollowedJob, Stored, TableForm, TableRows, Target

__all__ = ["FollowedJob", "Stored", "TableForm", "TableRows", "Target"]
