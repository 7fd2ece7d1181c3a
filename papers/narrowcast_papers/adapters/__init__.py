"""Adapters of a transformer, over links that count every bit."""
