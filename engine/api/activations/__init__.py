"""Activations and their gradients: the part of TPU embedding that a model uses (docs/activations.md)."""
