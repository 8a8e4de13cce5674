"""Tables larger than memory: the sources are read once for each share of the rows."""
