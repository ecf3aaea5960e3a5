"""What ranks are doing: their stacks, what those mean, who does something else than the others. Pure.

`frames` reads what Python's `faulthandler` writes; `folding` says in which call a stack is, and where in the
user's own code; `activity` is what a launcher tells of its machine; `movement` says since when a rank stands
still; `grouping` puts all ranks together, and `words` says it. `launch/stacks` asks the processes.
"""
