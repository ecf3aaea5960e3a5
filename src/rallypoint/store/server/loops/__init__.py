"""Sockets for a core: the pump that moves its bytes, and the two event loops that it runs on."""
