"""Import paths below ``penstock.io.targets`` that stay."""
