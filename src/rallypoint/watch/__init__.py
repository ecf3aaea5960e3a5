"""Looking at a job: `status`, `timeline`, `web`. What it means is decided in `rollcall/`."""
