"""What makes a measurement worthless."""

from __future__ import annotations

from rallypoint.errors import RallypointError


class BenchError(RallypointError):
    """A server died, gave a wrong answer, or gave none in time; or there is no room for a load."""
