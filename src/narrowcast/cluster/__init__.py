"""Clients on Ray actors (Ray is imported only here), and the fleets they make up."""
