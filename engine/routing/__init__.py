"""Route frames to the shares of a job: from validated frames to an Arrow record batch per share, and back to frames."""

from penstock.routing.blocks import Head, RoutedBlock, Router, frames_of

__all__ = ["Head", "RoutedBlock", "Router", "frames_of"]
