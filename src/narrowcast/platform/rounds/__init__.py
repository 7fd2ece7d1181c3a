"""The round loop: who takes part, what is sent and trained, how a round closes, and its record."""
