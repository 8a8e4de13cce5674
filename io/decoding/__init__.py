"""Record batches to frames: schemas, columns, rows, examples, and what becomes of a bad row."""
