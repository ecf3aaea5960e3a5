"""A server in a process of its own: where it listens, how it is started, when it ends."""
