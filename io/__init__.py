"""Arrow in, Arrow out: sources, the row-stream schema, frames, and tables as Parquet.

May import pyarrow and the plain values of the engine (frames, errors); never jax, the kernels or
the pipeline. Imported as ``penstock.io``: the standard ``io`` is another module.
"""
