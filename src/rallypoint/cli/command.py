"""A command: a function, its arguments, and its help. Built on argparse."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from rallypoint.errors import UsageError


class Argument:
    """An option or a positional argument, with argparse's keywords for it.

    `variable` is the environment variable that stands in for it.
    """

    def __init__(self, *names: str, help: str, variable: str = "", **keywords: Any) -> None:
        self.names = names
        self.is_option = names[0].startswith("-")
        self.takes_value = keywords.get("action", "store") in ("store", "append")
        self._variable = variable
        self._keywords = {"help": _describe(help, variable, keywords), **keywords}

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        keywords = dict(self._keywords)
        if value := os.environ.get(self._variable):
            keywords["default"] = value
            keywords.update({"required": False} if self.is_option else {"nargs": "?"})
        group.add_argument(*self.names, **keywords)

    @property
    def usage(self) -> str:
        """How a positional argument stands in the usage line."""
        name: str = self._keywords["metavar"]
        forms = {"?": f"[{name}]", "*": f"[{name}]...", "+": f"{name}...", argparse.REMAINDER: f"[{name}]..."}
        return forms.get(self._keywords.get("nargs", ""), name)


def _describe(help: str, variable: str, keywords: Mapping[str, Any]) -> str:
    """The help, with variable, default and `required` behind it; not the default if the help names it."""
    default = keywords.get("default")
    parts = [help.replace("%", "%%")]
    if variable:
        parts.append(f"[env var: {variable}]")
    if type(default) in (str, int, float) and default != "" and "default" not in help:
        parts.append("[default: %(default)s]")
    if keywords.get("required"):
        parts.append("[required]")
    return " ".join(parts)


class Command:
    """A function that takes the parsed arguments, and returns the exit code.

    Its docstring is the help. With `takes_dashes`, a word that looks like an option but is none is a value.
    """

    def __init__(
        self, run: Callable[..., int | None], arguments: Sequence[Argument], *, takes_dashes: bool = False
    ) -> None:
        self._run = run
        self._arguments = arguments
        self._takes_dashes = takes_dashes
        self._help = _paragraphs(run.__doc__ or "")
        self.summary = self._help.partition("\n")[0]

    def __call__(self, prog: str, words: Sequence[str]) -> int:
        """Do what the words say; `prog` is how the command was called."""
        positionals = [each.usage for each in self._arguments if not each.is_option]
        parser = _Parser(prog, " ".join(["[OPTIONS]", *positionals]), self._help, self._arguments)
        return self._run(**vars(parser.parse_args(self._options_first(parser, words)))) or 0

    @property
    def options(self) -> list[str]:
        return [name for each in self._arguments if each.is_option for name in each.names]

    def _options_first(self, parser: _Parser, words: Sequence[str]) -> list[str]:
        """The options, then the rest: argparse would not take positional arguments from between options.

        Nor would it take a value that begins with a dash.
        """
        takes_value = {name: each.takes_value for each in self._arguments for name in each.names}
        options: list[str] = []
        rest: list[str] = []
        left = iter(words)
        for word in left:
            name = word.partition("=")[0]
            if word == "--":
                rest += left
            elif name in (*self.options, *_HELP_OPTIONS):
                value = next(left, None) if name == word and takes_value.get(name) else None
                options.append(word if value is None else f"{word}={value}")
            elif word.startswith("-") and word != "-" and not self._takes_dashes:
                parser.error(f"there is no option {name}{_similar(name, self.options)}")
            else:
                rest.append(word)
        return [*options, "--", *rest] if any(word.startswith("-") for word in rest) else [*options, *rest]


class Group:
    """Commands that have a name in common."""

    def __init__(self, summary: str, commands: Mapping[str, Command]) -> None:
        self.summary = summary
        self.commands = commands

    def __call__(self, prog: str, words: Sequence[str]) -> int:
        if not words or words[0] not in self.commands:
            summaries = {name: each.summary for name, each in self.commands.items()}
            return print_commands(prog, self.summary, summaries, words)
        return self.commands[words[0]](f"{prog} {words[0]}", words[1:])


def command(
    *arguments: Argument, takes_dashes: bool = False
) -> Callable[[Callable[..., int | None]], Command]:
    """Make a function a command with these arguments."""
    return lambda run: Command(run, arguments, takes_dashes=takes_dashes)


def not_negative(text: str) -> int:
    """A type of argument: a number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return int(text)


def print_commands(
    prog: str, help: str, summaries: Mapping[str, str], words: Sequence[str], options: Sequence[Argument] = ()
) -> int:
    """Print the help of a group; UsageError for a word that asks for something else."""
    parser = _Parser(prog, "[OPTIONS] COMMAND [ARGS]...", help, options)
    if words and words[0] not in _HELP_OPTIONS:
        kind = "option" if words[0].startswith("-") else "command"
        parser.error(f"there is no {kind} {words[0]}{_similar(words[0], summaries)}")
    commands = parser.add_argument_group("commands")
    for name, summary in summaries.items():
        commands.add_argument(name, help=summary.replace("%", "%%"))
    parser.print_help()
    return 0 if words else 2


def print_help(prog: str, forms: Sequence[str], help: str, arguments: Sequence[Argument]) -> None:
    """Print the help of a command that takes its words apart by itself; it can be called in several forms."""
    _Parser(prog, f"\n{'':7}{prog} ".join(forms), _paragraphs(help), arguments).print_help()


_HELP_OPTIONS = ("-h", "--help")


class _Parser(argparse.ArgumentParser):
    """One whose errors are ours."""

    def __init__(self, prog: str, usage: str, help: str, arguments: Sequence[Argument]) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}",
            description=help,
            formatter_class=_Formatter,
            add_help=False,
            allow_abbrev=False,
        )
        positionals, options = (self.add_argument_group(title) for title in ("arguments", "options"))
        for each in arguments:
            each.add_to(options if each.is_option else positionals)
        options.add_argument(*_HELP_OPTIONS, action="help", help="Show this message and exit.")

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"`{self.prog} --help` shows how to call it")


class _Formatter(argparse.HelpFormatter):
    """Keeps paragraphs apart."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            super(_Formatter, self)._fill_text(each, width, indent) for each in text.split("\n")
        )


def _paragraphs(text: str) -> str:
    """The text with a line for each of its paragraphs."""
    return "\n".join(" ".join(each.split()) for each in text.split("\n\n"))


def _similar(word: str, names: Iterable[str]) -> str:
    import difflib

    found = difflib.get_close_matches(word, names)
    return f"; did you mean {' or '.join(found)}?" if found else ""


JSON = Argument("--json", dest="as_json", action="store_true", help="Print JSON.")
