"""Partitions of brokers' topics as sources."""
