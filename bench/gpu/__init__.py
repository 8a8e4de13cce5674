"""Programs compiled for an H200, on a machine without a GPU."""
