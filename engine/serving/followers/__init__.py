"""What follows a service or its deltas, for targets and for shared files."""
