"""Data sets: reading, splitting, partitioning across clients, and download."""
