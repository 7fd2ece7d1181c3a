"""Durable files: writes, checkpoints, the journal; the seams to the machine that simulations replace."""
