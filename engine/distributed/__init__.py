"""Several processes over the same tables: each holds a share of the rows, all see the frames in one order."""
