"""What the ranks of this machine are doing: their stacks, what those mean, and a report to the job's store.

Each rank has a helper thread that writes the stacks of all threads into a file when it is sent a signal; no
other thread is interrupted. From a launcher's thread to what users read:

    watching        the thread: takes samples, reports them to the store, and announces a stall
    sampling        a sample: which process each rank is, what it does, and for how long
    requesting      the stacks of processes: signals, and the files with the answers
    system, tools   what the operating system, nvidia-smi and py-spy know of a process
    frames          reads what `faulthandler` writes
    folding         in which call a stack is, and where in the user's own code
    movement        since when a rank stands still
    activity        what a launcher reports of its machine, and how that is packed
    grouping        all ranks of a job, by what they do
    words           the same in words

A rank's side is in `pytorch/injection/rallypoint_hooks.py` and `steps`. The last six are pure.
"""
