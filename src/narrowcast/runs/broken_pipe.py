"""Output whose reader has gone: closing a pipe must not end a run."""

from __future__ import annotations

import os
import sys


def discard_output() -> None:
    """Discard what is printed from here on, as after `narrowcast run ... | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
