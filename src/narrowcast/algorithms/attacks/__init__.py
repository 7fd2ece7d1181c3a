"""Attacks of an honest-but-curious server: a transcript of what it sees, and what it can infer from it."""
