"""What settings of dynamic tables would do to the keys of a log."""
