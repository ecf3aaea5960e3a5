"""The work of `rallypoint run`: options and their sources, torchrun's command line, reports of failures.

The output is in `cli`; the code that runs inside of torch's processes is in `pytorch`.
"""
