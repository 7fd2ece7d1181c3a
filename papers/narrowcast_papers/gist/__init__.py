"""GIST on citation graphs."""
