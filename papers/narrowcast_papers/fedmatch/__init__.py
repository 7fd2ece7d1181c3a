"""FedMatch: labels and images without, at the clients or at the server, beside FixMatch and UDA in FedAvg."""
