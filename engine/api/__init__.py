"""The engine as users see it, and what surrounds it: runs, deltas, reads, activations, planning."""
