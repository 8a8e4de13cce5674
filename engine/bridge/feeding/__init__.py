"""How rows reach the devices: laid out in host memory, and dispatched."""
