"""Plots of the pages that commands and the bench write."""
