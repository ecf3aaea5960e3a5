"""What schedulers and other launchers tell a process of its job: how many machines, which is the first, ...

`table` has one row per scheduler, `placement` reads it. Pure: variables come in as a mapping, and files by a
function that reads them.
"""
