"""The store server: one core, two byte pumps, and the process that it runs in."""
