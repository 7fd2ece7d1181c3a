"""The link between client and server, and what a client decides to send over it."""
