"""What formats of tables share."""
