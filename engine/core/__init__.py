"""The only path of a gradient: gate, pipeline and their observers. Knows no sources, files or networks."""
