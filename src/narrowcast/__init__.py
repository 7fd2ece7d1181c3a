"""narrowcast: experiments in federated learning over narrow links."""

__version__ = "0.1.0"
