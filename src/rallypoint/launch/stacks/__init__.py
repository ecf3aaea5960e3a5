"""What the ranks of this machine are doing: asked of them, understood, and told to the job's store.

Each rank has a helper thread that writes the stacks of all threads into a file when it is sent a signal; no
other thread is interrupted. `asking` has the question, `looking` asks, and `sampler` tells; `system` is what
the system knows of a process. A rank's side is in `pytorch/injection/rallypoint_hooks.py`.

The rest is pure. `frames` reads what `faulthandler` writes; `folding` says in which call a stack is, and
where in the user's own code; `activity` is what a launcher tells of its machine; `movement` says since when
a rank stands still; `grouping` puts all ranks together, and `words` says it.
"""
