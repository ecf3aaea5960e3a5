"""The names of commands and targets."""

from __future__ import annotations

from typing import Final

COMMANDS: Final = ("init", "barrier", "ops", "accept", "bulk", "wakeup", "restart")
"""The subcommands that measure."""

RELAY: Final = "rallypoint-relay"
REDIS: Final = "redis"
TARGETS: Final = ("rallypoint-libuv", "rallypoint-legacy", RELAY, "torch-libuv", "torch-legacy", REDIS)
WORKERS: Final = "rallypoint-workers"
PURE: Final = "rallypoint-pure"
"""Ours without its compiled modules."""
BY_NAME: Final = (WORKERS, PURE)
"""Targets that take part only if they are asked for."""
AS_IS: Final = ("torch-libuv-as-is", "torch-legacy-as-is")
"""torch's servers as they come: they take part beside the others, and are not asked for by name."""
