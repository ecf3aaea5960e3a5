"""A server in a process of its own: where it listens, how it is started, when it ends.

Serving itself is in `core` and `loops`.
"""
