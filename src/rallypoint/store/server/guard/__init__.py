"""Who may come in: the job's secret, and TLS with a proof of it. What is said then is not its matter."""
