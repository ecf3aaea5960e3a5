"""`rallypoint verify`: real trainings of two ranks by every usual route. What they run is in `pytorch`."""

from __future__ import annotations

from pathlib import Path

SIMULATION = Path(__file__).parent / "simulation"
"""On PYTHONPATH, it makes torch behave like another build; its `sitecustomize` says which."""
