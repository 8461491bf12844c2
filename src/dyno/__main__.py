"""`python -m dyno`: the command line if `dyno` is not on the path."""

from dyno.cli.app import main

main()
