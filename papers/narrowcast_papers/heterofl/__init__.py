"""Slices of a model for unequal devices."""
