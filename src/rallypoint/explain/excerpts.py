"""Long texts of logs, cut so that one sees it. Pure."""

from __future__ import annotations


def excerpt(text: str, most: int) -> str:
    """The text, or as many of its first words as fit, and a sign that there are more."""
    if len(text) <= most:
        return text
    cut = text[: most - 2]
    border = cut.rfind(" ") if text[most - 2] != " " else len(cut)
    # A text that has no blank for long (a path, a list of numbers) is cut where it must be.
    return f"{cut[:border] if border > most // 2 else cut} …"
