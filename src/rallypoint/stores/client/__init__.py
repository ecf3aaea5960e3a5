"""The client's side of a connection to a store server: reaching it, requests and replies, deadlines.

What a store makes of them is one folder up.
"""
