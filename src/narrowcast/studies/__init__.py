"""A study from its file to its result, with everything that a run has: what stands around `tuning`."""
