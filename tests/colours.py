"""How well a colour stands out from another."""

from __future__ import annotations

from matplotlib.colors import to_rgb


def contrast(one: str, other: str) -> float:
    """By the definition of WCAG: from 1 for the same colour to 21 for black on white."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    channels = (
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in to_rgb(colour)
    )
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), channels, strict=True))
