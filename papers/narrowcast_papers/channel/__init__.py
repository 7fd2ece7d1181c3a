"""The channel ablation."""
