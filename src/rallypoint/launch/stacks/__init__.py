"""Asking the ranks of this machine what they are doing, and telling the job's store.

A rank lets Python's `faulthandler` write its stack into a file when a signal comes: that is C code, which
needs no interpreter lock, so it also answers in the middle of a long call. No thread is added to a rank, and
nothing runs in it between the questions. `sampler` asks; `answering` is the rank's side; `system` is what the
system knows of its process.
"""
