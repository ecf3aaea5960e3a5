"""Who is here, who is missing, who waits for what: what a server or a relay tells of itself, and its meaning.

Pure: nothing in here knows sockets, processes or clocks. Servers make a `Snapshot` when they are asked for
one; `judging` turns it into a `Roll` for people, `words` into text.
"""
