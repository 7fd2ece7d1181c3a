"""The clients' half of a round: what they send, and the sums of it."""
