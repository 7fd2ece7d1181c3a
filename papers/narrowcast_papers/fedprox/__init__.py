"""FedProx and stragglers."""
