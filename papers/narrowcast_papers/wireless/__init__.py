"""The report on quantised wireless links."""
