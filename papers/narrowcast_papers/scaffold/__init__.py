"""SCAFFOLD: rounds to a target with similar data."""
