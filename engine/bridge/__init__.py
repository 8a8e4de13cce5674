"""The only room that imports jax: where rows live on the devices, and the programs that touch them."""
