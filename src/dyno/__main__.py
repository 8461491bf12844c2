"""`python -m dyno`: the command line where no `dyno` is on the path."""

from dyno.cli.app import main

main()
