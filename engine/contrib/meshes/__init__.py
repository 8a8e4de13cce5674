"""Tables over a mesh that spans the processes of a JAX job."""
