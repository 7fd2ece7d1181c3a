"""`python -m narrowcast` is the command line."""

from narrowcast.cli.main import main

main()
