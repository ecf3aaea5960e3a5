"""Relays: a machine's ranks connect to one, which asks the store for all of them over one connection.

`core` is what a relay answers and asks, without I/O. `relay` gives it sockets, `passing` is a relay for a
server that knows no sessions, and `hosting` starts one in a process of its own.
"""
