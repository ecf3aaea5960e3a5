"""The stores that users open, with torch's names but without torch: over TCP, in a file, in memory.

How a job meets at a store by torch's own means is in `pytorch`.
"""
