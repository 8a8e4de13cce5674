"""Files that penstock writes and reads back: tables, deltas, quarantines."""
