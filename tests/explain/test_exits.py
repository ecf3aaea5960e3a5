"""How a process has ended, in words."""

from __future__ import annotations

import pytest

from rallypoint.exits import exit_text, hint_for, signal_name


@pytest.mark.parametrize(
    ("code", "text", "hint"),
    [
        (1, "exit code 1", ""),
        (3221225477, "exit code 3221225477 (0xC0000005, access violation)", "PYTHONFAULTHANDLER"),
        (3221225495, "exit code 3221225495 (0xC0000017, no memory)", "page file"),
        (
            3221225786,
            "exit code 3221225786 (0xC000013A, Ctrl-C, Ctrl-Break, or its console window was closed)",
            "",
        ),
        (3221226505, "exit code 3221226505 (0xC0000409, it has aborted itself)", "its own message"),
        (1073807364, "exit code 1073807364 (0x40010004, the system has ended it)", "logged off"),
    ],
)
def test_a_status_of_windows_is_told_in_words(code: int, text: str, hint: str) -> None:
    assert exit_text(code) == text
    found = hint_for(f"ended with {exit_text(code)}")
    assert hint in found
    assert bool(hint) == bool(found)


def test_signals_have_names_and_hints() -> None:
    assert (signal_name(9), signal_name(77)) == ("SIGKILL", "SIG77")
    assert "memory" in hint_for("has ended by signal SIGKILL")
