"""A Python for Windows on Linux, and tests that mean something only there.

`tests/on_windows.py` is the command. `laying` puts Wine and the interpreter into a folder, `packages` adds
torch and what the tests need, `wine` runs a command there. Tests of this folder are collected on Windows
alone.
"""
