"""FedMAvg and SFMF, and baselines of ratings."""
