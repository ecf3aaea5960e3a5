"""Relays: a machine's ranks connect to one, which asks the store for all of them over one connection.

`core/` is pure: what is combined, asked and answered. Here are its sockets and its process. The store's side
of a session is in `store/core/sessions.py`.
"""
