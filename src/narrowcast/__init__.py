"""narrowcast: experiments in federated learning over narrow links."""

from importlib.metadata import version

__version__ = version("narrowcast")
