"""Finding out what is wrong: `doctor` (machines), `builds`, `verify` (trainings)."""
