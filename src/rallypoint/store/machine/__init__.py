"""Facts that the operating system tells: ports, names, interfaces, limits, packages.

Nothing here changes the system or judges it. A fact that is not told is None, and no reason to fail.
"""
