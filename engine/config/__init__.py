"""What the tables are: optimizers, tables and features, EmbeddingConfig, lint, and the protos behind them.

Import from the modules by full name. Nothing is imported here, so that the protobuf runtime is loaded only by those
who read a configuration. This room knows nothing of jax, pyarrow, streams or devices.
"""
