"""Finding out what is wrong: `doctor` (machines), `explain` (logs), `builds`, `verify` (trainings)."""
