"""Which ranks are present, which are missing, and who waits for what.

Servers and relays make a `Snapshot` on request, and write events. `judgement` turns a snapshot into a `Roll`,
and `roll` turns that into text. Pure: no sockets, processes, clocks or files.
"""
