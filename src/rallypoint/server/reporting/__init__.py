"""What a server tells besides its replies: the events file, stall reports, the processes behind clients."""
