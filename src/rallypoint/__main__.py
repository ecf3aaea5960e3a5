"""`python -m rallypoint` is the same as `rallypoint`."""

from rallypoint.cli.main import main

main()
