"""How words become arguments, whatever the command; and what a shell is told for completion."""

from __future__ import annotations

from argparse import REMAINDER
from pathlib import Path

import pytest

from command_line import invoke
from rallypoint.cli.command import JSON, Argument, Command, not_negative
from rallypoint.errors import UsageError

pytestmark = pytest.mark.windows

_FILES = Argument("files", nargs="*", metavar="FILE", help="Files.")
_LIMIT = Argument("--limit", action="append", metavar="TEXT", help="A limit.")
_RANK = Argument(
    "--rank", type=not_negative, metavar="N", variable="SOME_RANK", required=True, help="A rank."
)
_COMMAND = Argument("words", nargs=REMAINDER, metavar="-- COMMAND", help="A command.")
_PLACE = Argument("place", metavar="PLACE", help="A place.")


def _parse(arguments: list[Argument], line: str, *, takes_dashes: bool = False) -> dict[str, object]:
    found: dict[str, object] = {}
    command = Command(lambda **values: found.update(values), arguments, takes_dashes=takes_dashes)
    assert command("rallypoint x", line.split()) == 0
    return found


@pytest.mark.parametrize(
    ("arguments", "line", "expected"),
    [
        ([_FILES, JSON], "a --json b", {"files": ["a", "b"], "as_json": True}),
        ([_FILES, _LIMIT], "--limit a x --limit=b", {"files": ["x"], "limit": ["a", "b"]}),
        ([_FILES, _LIMIT], "- --limit -5", {"files": ["-"], "limit": ["-5"]}),
        ([_PLACE, _COMMAND, JSON], "p --json", {"place": "p", "words": [], "as_json": True}),
        (
            [_PLACE, _COMMAND, JSON],
            "p -- make --json -- x",
            {"place": "p", "words": ["make", "--json", "--", "x"], "as_json": False},
        ),
    ],
)
def test_options_stand_anywhere_but_behind_two_dashes(
    arguments: list[Argument], line: str, expected: dict[str, object]
) -> None:
    assert _parse(arguments, line) == expected


def test_a_value_may_look_like_an_option() -> None:
    assert _parse([_PLACE, JSON], "--x --json", takes_dashes=True) == {"place": "--x", "as_json": True}
    assert _parse([_PLACE, JSON], "-- --json", takes_dashes=True) == {"place": "--json", "as_json": False}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "required: --rank"),
        ("--rank -1", "argument --rank: '-1' is no number from 0 on"),
        ("--rank", "--rank: expected one argument"),
        ("--ran 3", "there is no option --ran; did you mean --rank?"),
        ("--rank 3 more", "unrecognized arguments: more"),
    ],
)
def test_what_is_wrong_is_said_and_where_help_is(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        _parse([_RANK], line)
    assert message in caught.value.message
    assert "`rallypoint x --help`" in caught.value.hint


def test_a_variable_stands_in_for_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_RANK", "7")
    assert _parse([_RANK], "") == {"rank": 7}
    assert _parse([_RANK], "--rank 8") == {"rank": 8}


def test_a_command_that_is_none() -> None:
    assert invoke("--version").stdout.startswith("rallypoint ")
    for words, message in {
        ("statu",): "there is no command statu; did you mean status?",
        ("--nothing",): "there is no option --nothing",
        ("kv", "gte"): "there is no command gte; did you mean get?",
    }.items():
        error = invoke(*words).exception
        assert isinstance(error, UsageError)
        assert error.message == message
    assert [(said.exit_code, "--version" in said.stdout) for said in (invoke(), invoke("-h"))] == [
        (2, True),
        (0, True),
    ]


def test_the_help_begins_with_what_most_users_need() -> None:
    commands = invoke("--help").stdout.partition("commands:\n")[2]
    assert commands.split()[0] == "run"


def test_completion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for words, some in {
        (): {"serve", "kv", "--version"},
        ("kv",): {"get", "set", "--help"},
        ("kv", "get"): {"--store", "--timeout"},
        ("status", "x:1"): {"--watch", "--json"},
        ("run",): {"--show-config"},
        ("nothing",): {""},
        ("kv", "nothing"): {""},
    }.items():
        assert some <= set(invoke("--complete", *words).stdout.split("\n")), words
    monkeypatch.setattr("rallypoint.cli.completion._current_shell", lambda: "bash")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    (tmp_path / ".bashrc").write_text("mine=1")
    script = invoke("--show-completion").stdout
    for _ in range(2):  # the second time, it is there already
        assert str(tmp_path / ".bashrc") in invoke("--install-completion").stdout
    assert (tmp_path / ".bashrc").read_text() == f"mine=1\n{script}"
