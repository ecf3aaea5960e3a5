"""The command line: one file per command; the only place that prints.

Data goes to standard output, the rest to standard error. Exit codes: 0 good, 1 findings, 2 usage.
"""
