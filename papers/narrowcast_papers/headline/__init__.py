"""The contests of uploads by budget over unequal links, in the open and hidden in sums."""
