"""The server: `loops/` moves bytes, `process/` starts it, `reporting/` tells of it."""
