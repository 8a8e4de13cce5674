"""The Flight service: producers' frames in, deltas and tables out."""
