"""Local training: all clients of a chunk are trained as one program."""
