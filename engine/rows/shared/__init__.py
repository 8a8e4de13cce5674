"""The memory of tables that other processes read."""
