"""Theory of the lecture: fixed points and the bound of Theorem 1."""
