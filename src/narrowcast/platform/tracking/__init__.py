"""What is kept of a run: the journal, MLflow, plots."""
