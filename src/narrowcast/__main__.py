"""`python -m narrowcast` is the command line."""

from narrowcast.cli import main

main()
