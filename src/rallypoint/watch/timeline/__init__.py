"""How a job came up, from the events that its store has written: when each rank came, and which were late.

`reading` reads files, `records` keeps the events of a run, `judgement` finds the members of the start-up and
the late ones, and makes a `Timeline`. `words` and `drawing` show it. All times are by the clock of the
process that wrote the events. The state of a store at one moment is in `watch/status`.
"""
