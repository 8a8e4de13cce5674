"""The kernels: coalesce and partition, in Cython, and their definition in NumPy (``reference``).

Nothing of penstock but pyx/ is imported here; no files, no clock, no jax, no pyarrow.
"""
