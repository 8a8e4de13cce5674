"""Configurations: optimizers, tables and features, EmbeddingConfig, lint, and the protos behind them.

Import from the modules by full name. This file imports nothing, so that only code that reads a configuration loads
the protobuf runtime. This package does not depend on jax, pyarrow, streams or devices.
"""
