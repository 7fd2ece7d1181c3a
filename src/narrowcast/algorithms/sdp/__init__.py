"""Low-rank semidefinite programs: problems, factored solvers, certificates and rounding."""
