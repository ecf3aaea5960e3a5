"""Who is here, who is missing, who waits for what: what a server or a relay tells of itself, and its meaning.

Servers make a `Snapshot` when they are asked for one, and write events; `judgement` makes a `Roll` of a
snapshot, and `roll` makes text of that. Pure: sockets, processes, clocks and files are not in here.
"""
