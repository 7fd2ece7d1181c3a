"""Data sets: their types, readers and fetchers."""
