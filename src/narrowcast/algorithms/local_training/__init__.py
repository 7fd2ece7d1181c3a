"""Local training of a whole cohort as one tensor program."""
