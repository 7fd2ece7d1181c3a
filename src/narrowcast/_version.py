"""The version of the package, below all that name it."""

__version__ = "0.2.0"
