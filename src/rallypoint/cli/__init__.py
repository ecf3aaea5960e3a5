"""The command line: one file per command; the only place that prints.

`main` has the table of commands, `command` what they are made of, `completion` what shells ask; the rest is
shared: `findings`, `foreground`, `printing`, `signals`. Data goes to standard output, the rest to standard
error. Exit codes: 0 good, 1 findings, 2 usage.
"""
