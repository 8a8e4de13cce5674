"""The optimizer step as Pallas kernels for the cores of a TPU."""
