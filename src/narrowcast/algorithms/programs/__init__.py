"""Solvers that are programs of their own, in any language: files in, iterates out."""
