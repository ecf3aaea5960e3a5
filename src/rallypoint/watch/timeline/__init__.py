"""How a job came up, from the events that its store has written: who came when, and who held up the others.

`reading` reads files, `records` keeps the events of a run, `members` finds who took part, `judgement` finds
who was late and makes a `Timeline`. `words` and `drawing` show it. All times are by the clock of the process
that wrote the events. What a store tells at one moment is in `watch/status`.
"""
