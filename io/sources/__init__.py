"""Any source to record batches: paths, streams, URIs, Arrow objects; containers and their protections."""
