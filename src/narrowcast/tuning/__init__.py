"""Studies: which values of an experiment serve best (Optuna is imported only here)."""
