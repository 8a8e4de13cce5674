"""The Flight service: takes frames from producers, and serves deltas and tables to readers."""
