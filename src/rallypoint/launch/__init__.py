"""`rallypoint run` without output: its options, where their values come from, and what torchrun gets."""
