"""Completion on Tab: the script for a shell, and the answer to each Tab."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

import psutil

from rallypoint.cli.command import Command, Group
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.options import FLAGS, OPTIONS

# Files are completed too: most arguments are paths.
_SCRIPTS = {
    "bash": """_rallypoint() {
    local words=$(rallypoint --complete "${COMP_WORDS[@]:1:COMP_CWORD-1}" 2>/dev/null)
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _rallypoint rallypoint
""",
    "zsh": """(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_rallypoint() {
    compadd -- ${(f)"$(rallypoint --complete "${(@)words[2,CURRENT-1]}" 2>/dev/null)"}
    _files
}
compdef _rallypoint rallypoint
""",
    "fish": """function __rallypoint
    rallypoint --complete (commandline -opc)[2..] 2>/dev/null
end
complete -c rallypoint -a '(__rallypoint)'
""",
}
_FILES = {"bash": ".bashrc", "zsh": ".zshrc", "fish": ".config/fish/completions/rallypoint.fish"}


def answer(option: str, words: Sequence[str], commands: Iterable[str]) -> int:
    """Do what one of the three options asks for; the exit code."""
    if option == "--complete":
        print(*candidates(words, commands), sep="\n")
        return 0
    script = _SCRIPTS[shell := _current_shell()]
    if option == "--show-completion":
        print(script, end="")
        return 0
    path = Path.home() / _FILES[shell]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if path.exists() else ""
        if script not in before:
            path.write_text(f"{before}\n{script}" if before else script)
    except OSError as error:
        raise RallypointError(f"cannot write {path}: {error.strerror}") from error
    print(f"rallypoint: completion for {shell} is in {path}; a new shell has it")
    return 0


def candidates(words: Sequence[str], commands: Iterable[str]) -> list[str]:
    """What may follow these words: commands or options."""
    if not words:
        return [*commands, "--help", "--version"]
    if words[0] not in commands:
        return []
    if words[0] == "run":  # it takes its words apart by itself
        return [*(each.flag for each in OPTIONS), *(each.flag for each in FLAGS)]
    found: Command | Group | None = getattr(import_module(f"rallypoint.cli.{words[0]}"), words[0])
    if isinstance(found, Group):
        if len(words) == 1:
            return [*found.commands, "--help"]
        found = found.commands.get(words[1])
    return [*found.options, "--help"] if found else []


def _current_shell() -> str:
    """The shell that this was called from, else the user's own."""
    parents = [parent.name() for parent in psutil.Process().parents()]
    for name in (*parents, os.path.basename(os.environ.get("SHELL", ""))):
        if (shell := name.lstrip("-")) in _SCRIPTS:
            return shell
    raise UsageError("this shell is none that can be completed for", hint=f"those are {', '.join(_SCRIPTS)}")
