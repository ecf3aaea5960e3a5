"""How the machines of a job find together, round after round: rules (`roster`), and their use."""
