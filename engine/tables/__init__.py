"""The tables of an engine: how they start, combine lookups, change, and are exchanged with other formats."""
