"""Which rows of a cached table are on the device."""
