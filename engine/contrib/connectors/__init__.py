"""Sources that a URI names and that are no files: topics of brokers, tables with versions, flights."""
