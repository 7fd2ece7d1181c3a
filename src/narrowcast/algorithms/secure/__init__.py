"""Secure aggregation: the server learns the sum of the updates and no single one, by pairwise masks or CKKS."""
