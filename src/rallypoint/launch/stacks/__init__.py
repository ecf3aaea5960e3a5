"""Asking the ranks of this machine what they are doing, and telling the job's store.

A rank writes its stacks into a file when a signal comes: the interpreter does it, between two of its steps;
and while the rank is in a long call of C code, `faulthandler`, which needs no interpreter lock. No thread is
added to a rank, and nothing runs in it between the questions. `asking` has the question, `looking` asks, and
`sampler` tells; `system` is what the system knows of a process. A rank's side is in
`pytorch/injection/rallypoint_hooks.py`.
"""
