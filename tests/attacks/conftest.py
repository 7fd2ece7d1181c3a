"""Makes the benchmarks importable: the table of attacks and its bounds are those of `benchmarks/attacks.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
