"""Semidefinite programs: MAXCUT, completion, localisation, and a cohort in two bands."""
