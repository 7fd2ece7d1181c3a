"""FedMD and its controls."""
