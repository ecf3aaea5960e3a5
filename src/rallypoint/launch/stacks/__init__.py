"""Asking the ranks of this machine what they are doing, and telling the job's store.

Each rank has a helper thread that writes the stacks of all threads into a file when it is sent a signal; no
other thread is interrupted. `asking` has the question, `looking` asks, and `sampler` tells; `system` is what
the system knows of a process. A rank's side is in `pytorch/injection/rallypoint_hooks.py`.
"""
