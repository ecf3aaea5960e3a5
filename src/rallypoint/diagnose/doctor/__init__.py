"""`rallypoint doctor`: examines this machine, its torch, and the place where a job is to meet.

    situation          what the user has said; every check gets it
    checks             the list of all checks, and running them side by side, each with a time limit
    machine, network, variables, torch, stores, engine, files
                       the checks; each `check_*` looks and yields findings, each `judge_*` is pure
    outlook            what will work on this machine, from all findings

For several machines, one doctor listens, or a launcher starts one on each:

    all_machines       where the doctors meet: at one that listens, or at the store of a launched job
    exchange           how they exchange cards and results through a store
    reachability       a machine's card and the ways to others; answering probes, and probing the others
    between_machines   findings about all ways between them

A `Finding` (diagnose.findings) is one line of the report. Nothing here prints, and nothing here changes the
machine; the command line (`cli/doctor.py`) does both.
"""
