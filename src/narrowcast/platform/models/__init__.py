"""Models that clients train."""
