"""Programs compiled for every generation of TPU, on a machine that has none."""
