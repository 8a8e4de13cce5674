"""penstock: a streaming update engine for embedding tables."""
