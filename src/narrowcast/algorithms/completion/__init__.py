"""Matrix completion: observed entries and products on them, problems, and one solver a file."""
