"""The interface of formats of tables (``Tensor``, ``FORMAT``), and Parquet."""
