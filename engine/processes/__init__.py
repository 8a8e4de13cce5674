"""Engines whose tables span the processes of a JAX job."""
