"""Jobs of many machines: for now, the deltas of all shares as one stream."""
