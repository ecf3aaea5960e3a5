"""The report of `rallypoint status`, as lines and as JSON. The command that prints it is in `cli`."""
