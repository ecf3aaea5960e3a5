"""Who may connect: users of this machine, and whoever proves the job's secret under TLS."""
