"""The kernels (sums, ids, rows, updates) in Cython and C. Their definition in NumPy is tests/support/reference.py.

They import no other package of penstock; no files, no clock, no jax, no pyarrow.
"""
