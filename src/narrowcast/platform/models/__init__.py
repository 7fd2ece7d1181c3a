"""The models that clients train."""
