"""Files without their contents: atomic and appended files, pipes, and the descriptors of this process."""
