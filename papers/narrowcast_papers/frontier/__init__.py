"""Accuracy against traffic: equal tuning of every method, bands of uplink, decay and downloads."""
