"""Sums that the server learns, of updates that it does not: CKKS, pairwise masks, and Paillier beside them."""
