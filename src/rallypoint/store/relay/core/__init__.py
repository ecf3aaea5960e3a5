"""What a relay answers and asks, pure: no socket, no clock, no thread."""
