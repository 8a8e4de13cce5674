"""The package that imports jax: the device layout of rows, and the programs that read and update them."""
