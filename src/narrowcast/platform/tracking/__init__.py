"""The record of a run: the journal, MLflow, plots."""
