"""The directory of a dynamic table: which keys have a row, and what a step changes."""
