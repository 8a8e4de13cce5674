"""Convert any source to record batches: paths, streams, URIs, Arrow objects; check containers for damage."""
