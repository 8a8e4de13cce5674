"""Pages that commands write, or serve while they run."""
