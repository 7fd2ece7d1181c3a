"""Uploads: how each client's update is taken, encoded, decoded and added up, for rows of a matrix and for tensors."""
