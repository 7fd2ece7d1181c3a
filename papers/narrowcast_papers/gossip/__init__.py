"""Learning without a server, uploads in turns, and uploads that clients keep back: studies of narrowcast."""
