"""A share of the rows, and results joined in order: what jobs on a cluster and replays in passes have in common.

``blocks`` routes validated frames to the shares of a job, as an Arrow record batch per share, and back to frames.
``joined_…`` and ``whole_tables`` present several shares as one engine. ``contrib.passes`` replays one share after
the other on one machine, ``contrib.ray`` runs all of them as actors. rows/shares.py says which rows a share has.
"""

from penstock.contrib.shares.blocks import RoutedBlock, Router, frames_of
from penstock.contrib.shares.whole_tables import WholeTables, mapped_array

__all__ = ["RoutedBlock", "Router", "WholeTables", "frames_of", "mapped_array"]
