"""Operations on files: atomic and growing files, pipes, and the limit on file descriptors."""
