"""A replay in several passes over its sources, each over one share of the rows: for tables that exceed memory."""
