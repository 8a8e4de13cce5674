"""Values: frames, statistics, options, learning rates; configurations and optimizers. No input or output."""
