"""Ditto: the best pull on point estimation."""
