"""Robust rules against attackers among the clients."""
