"""Everything on devices, by jax: the layout of rows, and the programs that read and update them."""
