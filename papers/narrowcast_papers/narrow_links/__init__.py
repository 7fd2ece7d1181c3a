"""Optimisation methods under narrow links, and server optimisers."""
