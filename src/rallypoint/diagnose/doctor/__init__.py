"""`rallypoint doctor`: examines this machine, its torch, and the place where a job is to meet.

    situation          what the user has said; every check gets it. And whether it is sane
    checks             the list of all checks, running them side by side, and those that a launcher asks for
    machine, network, torch, stores, engine
                       the checks; each `check_*` looks and yields findings, each `judge_*` is pure

For several machines, one doctor listens, or a launcher starts one on each:

    exchange           where doctors meet: at one that listens, or at the store of a launched job
    probes             a machine's card, and the ways that it tries to others
    between_machines   findings about all ways between them

A `Finding` (diagnose.findings) is one line of the report; what will work follows from all of them. Nothing
here prints, and nothing here changes the machine; the command line (`cli/doctor.py`) does both.
"""
