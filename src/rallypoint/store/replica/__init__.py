"""A store that outlives its machine: its inputs are a log on an engine that clusters run already."""
