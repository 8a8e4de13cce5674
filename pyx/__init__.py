"""The kernels (sums, ids, rows, updates) in Cython and C, and their definition in NumPy (``reference``).

They import no other package of penstock; no files, no clock, no jax, no pyarrow.
"""
