"""Codecs: the encoding of updates into bytes, and their size."""
