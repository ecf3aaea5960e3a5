"""How the machines of a job meet, round after round: the rules (`roster`), their use, and the servers.

torchrun's side of it, the plug-in, is in `pytorch`.
"""
