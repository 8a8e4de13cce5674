"""Route frames to the shares of a job: from validated frames to an Arrow record batch per share, and back to frames."""

from penstock.routing.blocks import Block, Head, Router, frames_of

__all__ = ["Block", "Head", "Router", "frames_of"]
