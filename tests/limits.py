"""The one time limit of the tests."""

# For what ends by itself on every machine, however slow: only a real hang takes as long.
HANG_S = 600.0
