"""How a job came up, from the events that its store has written: who came when, and who held up the others.

`reading` makes a `Record` of a file, `judging` a `Timeline` of records, `words` and `drawing` show it. Only
the first and the last of them know files. All times are the clock's of whoever wrote the events.
"""
