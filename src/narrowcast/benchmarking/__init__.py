"""Benchmarks of solvers: every solver on every problem with every seed, side by side, each an ordinary solve."""
