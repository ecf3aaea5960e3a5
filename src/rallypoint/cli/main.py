"""The `rallypoint` command: finds the subcommand, and turns errors into messages and exit codes.

Every command waits for the imports of this module: so it imports neither typing, nor argparse, nor a command.
"""

from __future__ import annotations

import errno
import io
import os
import sys

import rallypoint
from rallypoint.errors import RallypointError, UsageError

COMMANDS = {
    "run": "Start a script, a module (-m) or a command (--) as a distributed job; --help tells the options.",
    "status": "Show who is here, who is missing, and who waits for what.",
    "stacks": "Show what each rank of a job is doing: ranks that do the same together, the odd ones first.",
    "web": "Serve a page about a store until SIGINT or SIGTERM: "
    "who is here, who is missing, who waits for what.",
    "timeline": "Tell how a job came up: who came last, who waited for it, and for how long.",
    "doctor": "Examine this machine: torch, names, ports, stores, limits; and what will work here.",
    "explain": "Find the first failure in the logs of a job: who failed, where, why, and what to do.",
    "verify": "Train two ranks for some seconds by every usual route: torchrun, accelerate, and by hand.",
    "enable": "Let every torch of this Python environment use Rallypoint where it was built without libuv.",
    "disable": "Undo `rallypoint enable`.",
    "secret": "Make a secret for a job, or a token of it that may only look.",
    "serve": "Serve a TCPStore until SIGINT or SIGTERM.",
    "relay": "Relay between clients here and a store elsewhere, until SIGINT or SIGTERM.",
    "kv": "Look into a TCPStore, torch's own included, and change it.",
    "erase": "Remove what a job has left on an engine: its stores begin anew.",
    "bench": "Measure the stores of this machine against each other, in turns; Linux only.",
    "torch": "Builds of torch: is the libuv server in one, how to build one with it, how far a build is.",
}
"""Each has a module of its name here, with a callable of its name, which is imported when it is called."""


def main() -> None:
    """Run the command line; an error of ours becomes a message on standard error and exit code 1 or 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Lines: where both streams go to one log, messages about a report come behind the report.
        # Backslashes: a log or a key may hold characters that the encoding of a console lacks.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        try:
            code = call(sys.argv[1:])
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here and not at the interpreter's end: an error must become a message
    except RallypointError as error:
        from rallypoint.text import printable_lines

        # A file name, or what the other side of a connection said, may be part of it.
        print(f"rallypoint: {printable_lines(error.message)}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {printable_lines(error.hint)}", file=sys.stderr)
        code = 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt as stop:
        from rallypoint.cli.signals import exit_code

        print("rallypoint: interrupted", file=sys.stderr)
        code = exit_code(stop)
    except OSError as error:  # ours are caught above: what is left is a standard stream
        if error.errno != errno.EPIPE:  # a reader that has seen enough is no news
            print(f"rallypoint: cannot write to standard output: {error.strerror}", file=sys.stderr)
        os._exit(1)  # not by way of the interpreter's end, which would try to write it again
    sys.exit(code)


def call(words: list[str]) -> int:
    """Do what the words behind `rallypoint` say; the exit code."""
    name = words[0] if words else ""
    if name == "--version":
        from rallypoint.build import in_use

        print(f"rallypoint {rallypoint.__version__} ({in_use()})")
        return 0
    if name in COMMANDS:
        from importlib import import_module

        code: int = getattr(import_module(f"rallypoint.cli.{name}"), name)(f"rallypoint {name}", words[1:])
        return code
    if name in ("--complete", "--show-completion", "--install-completion"):
        from rallypoint.cli import completion

        return completion.answer(name, words[1:], COMMANDS)
    return _print_help(words)


def _print_help(words: list[str]) -> int:
    """Print the commands; UsageError for words that are none."""
    from rallypoint.cli.command import Argument, print_commands

    helps = {
        "--version": "Print the version and end.",
        "--install-completion": "Install completion for the current shell.",
        "--show-completion": "Print the completion for the current shell.",
    }
    options = [Argument(name, action="store_true", help=text) for name, text in helps.items()]
    purpose = "The meeting place of a distributed PyTorch job."
    return print_commands("rallypoint", purpose, COMMANDS, words, options)
