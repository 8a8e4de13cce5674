"""The tables of an engine: initialization, combiners, updates, and exchange with other formats."""
