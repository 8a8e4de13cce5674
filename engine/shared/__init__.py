"""Import paths below ``penstock.shared`` that stay."""
