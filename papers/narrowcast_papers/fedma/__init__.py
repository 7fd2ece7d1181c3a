"""FedMA beside FedAvg, FedProx, the ensemble and its own parts."""
