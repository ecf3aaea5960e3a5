"""What `rallypoint run` does: options and their sources, torchrun's command line, reports of failures.

What it prints is in `cli`; what runs inside of torch's processes is in `pytorch`.
"""
