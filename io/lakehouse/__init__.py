"""Tables with versions as sources: Delta Lake, Lance and Iceberg (docs/lakehouse.md)."""
