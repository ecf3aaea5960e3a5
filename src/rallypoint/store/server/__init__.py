"""The server: `loops/` moves bytes, `guard/` says who may connect, `process/` starts it, `events` reports."""
