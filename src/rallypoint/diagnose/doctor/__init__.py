"""What `rallypoint doctor` looks at: this machine, its torch, the place where a job is to meet.

`catalogue` lists the checks, `checking` runs them side by side, each with a time limit; what one needs is in
its `Situation`, and what it found is a `Finding`. `outlook` says from all of them what will work, `fixes`
what can be set right. `reaching` looks at the ways between machines. Nothing here prints, and nothing changes
anything.
"""
