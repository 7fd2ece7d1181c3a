"""Federated algorithms, one file each, client and server half together."""
