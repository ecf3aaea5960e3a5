"""The proof: real two-rank trainings, by every usual way to start one."""

from __future__ import annotations

from pathlib import Path

SIMULATION = Path(__file__).parent / "simulation"
"""On PYTHONPATH, it makes torch behave like another build; its `sitecustomize` says which."""
