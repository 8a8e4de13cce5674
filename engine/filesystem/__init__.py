"""Operations on files: atomic and growing files, pipes, and the file descriptors of this process."""
