"""What the ranks of this machine are doing: their stacks, what those mean, and a report to the job's store.

Each rank has a helper thread that writes the stacks of all threads into a file when it is sent a signal; no
other thread is interrupted (`pytorch/injection/rallypoint_hooks.py`). docs/concepts/architecture.md lists the
modules, from the launcher's thread (`watching`) to what users read (`words`).
"""
