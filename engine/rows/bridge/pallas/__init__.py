"""The optimizer step as Pallas kernels."""
