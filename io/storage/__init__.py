"""Files that penstock writes and reads back: atomic and appended files, tables, deltas, quarantines."""
