"""A run from an experiment to its folder: checked, run, recorded, resumed, submitted."""
