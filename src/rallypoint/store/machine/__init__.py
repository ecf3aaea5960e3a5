"""Facts that the operating system tells. Nothing here changes the system or judges it.

A fact that it does not tell is None, and no reason to fail.
"""
