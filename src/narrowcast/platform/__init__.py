"""The base of every experiment: types, contracts, the round loop, data, models and tracking."""
