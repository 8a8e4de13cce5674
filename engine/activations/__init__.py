"""Activations out, gradients of activations in: the side of TPU embedding that a model sees (docs/activations.md)."""
