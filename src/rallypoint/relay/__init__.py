"""Relays: a machine's ranks connect to one, which asks the store for all of them over one connection.

`combining` makes few requests (`slots`) of many, `upstream` gets each of them answered once over
connections that may break, `ranks` and `children` are those who ask, `core` puts these together: all pure.
`running` is the I/O, `passing` what is done for a server that knows no sessions, and `hosting` the process of
its own.
"""
