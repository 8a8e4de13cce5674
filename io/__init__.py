"""Arrow in, Arrow out: sources, the row-stream schema, frames, and tables as Parquet.

May import pyarrow, the kernels of pyx/ and the values of ``model`` (frames, configuration); never
jax or the pipeline. Imported as ``penstock.io``: the standard ``io`` is another module.
"""
