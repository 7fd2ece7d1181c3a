"""Matrix completion: the report's synthetic cases."""
