"""`rallypoint doctor`: examines this machine, its torch, and the place where a job is to meet.

`checks` lists the checks: each `check_*` looks and yields findings, each `judge_*` is pure. Of several
machines, doctors meet (`exchange`), try the ways between them (`probes`), and judge these
(`between_machines`). Nothing here prints, and nothing here changes the machine; `cli/doctor.py` does both.
"""
