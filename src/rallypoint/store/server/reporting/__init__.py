"""What a server tells besides its replies: the events file, stall reports, the processes behind clients.

What happened is found out by `core`, and what it means for a job is judged in `rollcall`.
"""
