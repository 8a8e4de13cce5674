"""The kernels (sums, ids, rows, updates) in Cython and C, and their definition in NumPy (``reference``).

Nothing of penstock but pyx/ is imported here; no files, no clock, no jax, no pyarrow.
"""
