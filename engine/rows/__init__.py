"""The tables of an engine: initialization, updates, and exchange with other formats."""
