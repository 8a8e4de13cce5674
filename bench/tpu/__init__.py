"""Programs compiled for every generation of TPU, on a machine without a TPU."""
