"""Printing what the doctor found: lines that fit the terminal, with or without colour."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from rallypoint.diagnose.doctor.between_machines import matrix
from rallypoint.diagnose.doctor.exchange import Gathered
from rallypoint.diagnose.findings import Finding, Outlook, Prospect, State
from rallypoint.text import shown

_STYLES: Final = {
    State.OK: "green",
    State.NOTE: "blue",
    State.WARNING: "yellow",
    State.FAILURE: "bold red",
    State.UNKNOWN: "cyan",
    Prospect.YES: "green",
    Prospect.WITH_HELP: "yellow",
    Prospect.NO: "bold red",
    Prospect.UNKNOWN: "cyan",
}
_STATE_WIDTH: Final = max(len(state.value) for state in State)
_WORDS: Final = {State.FAILURE: "failed", State.WARNING: "with a warning", State.UNKNOWN: "not known"}
_WIDEST: Final = 110
_LONGEST_TEXT: Final = 4000
_MATRIX_MOST: Final = 16
"""More machines than these do not fit on a screen; the findings name the pairs that fail."""


def print_findings(findings: Sequence[Finding]) -> None:
    """Findings of this machine or of others: nothing in their texts is obeyed, and none fills the screen."""
    names = max((len(shown(each.name)) for each in findings), default=0)
    for each in findings:
        _print_row(each.state, f"{shown(each.name):<{names}}", each.found)
        if each.hint and each.state is not State.OK:
            # Not wrapped, so that it can be pasted.
            print(f"{'':<{_STATE_WIDTH}}  {'':<{names}}  hint: {shown(each.hint, _LONGEST_TEXT)}")


def _print_row(state: State, name: str, text: str) -> None:
    """A state, a name, and a text that is wrapped beside them; paths and commands are kept whole."""
    margin = f"{'':<{_STATE_WIDTH}}  {'':<{len(name)}}  "
    lines = textwrap.wrap(
        shown(" ".join(text.split()), _LONGEST_TEXT),
        max(_width() - len(margin), 30),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]
    head = Text(f"{state.value:<{_STATE_WIDTH}}", style=_STYLES[state])
    body = "\n".join([f"  {name}  {lines[0]}", *(f"{margin}{line}" for line in lines[1:])])
    _console().print(head + Text(body), soft_wrap=True)


def print_heading(text: str) -> None:
    print(f"\n{shown(text, _LONGEST_TEXT)}")


def print_matrix(gathered: Gathered) -> None:
    if gathered.count > _MATRIX_MOST:
        return
    print("\nwho reaches whom, from the left to the top:")
    rows = [["", *map(str, range(gathered.count))], *matrix(gathered)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))


def print_outlook(outlook: Sequence[Outlook]) -> None:
    print("\nWhat will work here:")
    names = max(len(each.name) for each in outlook)
    width = max(len(each.value) for each in Prospect)
    for each in outlook:
        text = Text("  ") + Text(f"{each.prospect.value:<{width}}", style=_STYLES[each.prospect])
        _console().print(
            text + f"  {each.name:<{names}}  {shown(each.why, _LONGEST_TEXT)}".rstrip(), soft_wrap=True
        )


def conclude(findings: Sequence[Finding], seconds: float) -> bool:
    """Say in one line how it went; whether nothing will make a job fail."""
    counts = {state: sum(each.state is state for each in findings) for state in State}
    texts = [f"{counts[state]} {word}" for state, word in _WORDS.items() if counts[state]]
    said = ", ".join(texts) or "all is well"
    print(f"rallypoint: {said} ({len(findings)} findings in {seconds:.1f} s)", file=sys.stderr)
    return not counts[State.FAILURE]


def _console() -> Console:
    return Console(width=_width(), highlight=False)


def _width() -> int:
    return min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
