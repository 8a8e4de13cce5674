"""Tables in files that other processes read without a lock: their writer (folder, table_writer) and ``Reader``.

Neither jax nor pyarrow, nor an engine. The memory of another process is checked before it is read.
"""
