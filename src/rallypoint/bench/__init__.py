"""Measurements: the stores of this machine under the loads of a job, in turns; the command is in cli."""
