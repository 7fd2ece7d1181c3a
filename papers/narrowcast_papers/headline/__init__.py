"""Which upload for which budget over unequal links, in the open and hidden in sums."""
