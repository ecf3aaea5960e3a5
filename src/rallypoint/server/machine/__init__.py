"""What the operating system says about itself: ports, names, limits, packages.

It asks and never changes anything; what a system does not tell is None, and no reason to fail.
"""
