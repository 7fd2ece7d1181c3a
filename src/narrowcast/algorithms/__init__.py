"""Everything that decides what a client computes and what it sends."""
