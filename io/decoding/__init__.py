"""Convert record batches to frames: schemas, columns, rows, examples, and the handling of bad rows."""
