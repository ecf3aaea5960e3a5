"""Looking at a job: `status`, `timeline`, `web`. What a snapshot means is decided in `store/rollcall/`."""
