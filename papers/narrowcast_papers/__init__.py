"""Tables and figures of papers and studies that `narrowcast reproduce` runs, one folder each."""

__version__ = "0.2.0"
