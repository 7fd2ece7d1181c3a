"""What every experiment runs on: types, contracts, the round loop, data, models, tracking."""
