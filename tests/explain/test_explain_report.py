"""The explanation as text and as JSON: short, never wider than the terminal, and nothing in it is obeyed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.explain.events import NOBODY, Entry, Event, Kind, Log, Match, Process, Raised
from rallypoint.explain.knowledge import knowledge
from rallypoint.explain.report import as_json, as_text
from rallypoint.explain.reported import LAUNCHER
from rallypoint.explain.verdict import Explanation, Verdict
from rallypoint.frames import QuotedFrame
from rallypoint.text import clock, columns, short_path, wrapped

pytestmark = pytest.mark.windows

_TRAIN = QuotedFrame("/home/alice/work/projects/training/code/train.py", 12, "step", "check(lr)")
_ERROR = Raised("ValueError", "learning rate 3.0 is out of range [0, 1]", 812, frames=(_TRAIN,))
_LOGS = (Log("train.log", lines=1234),)
_EVIL = "\x1b]0;title\x07\x08\x9b31m\u202e 配置错误"


def _entry(
    role: str = "cause", why: str = "", do: Sequence[str] = (), title: str = "The port is taken"
) -> Entry:
    return Entry("an-id", title, role, (), "EADDRINUSE", why, tuple(do), ("https://example.org",))


def _event(kind: Kind = Kind.ERROR, line: int = 812, text: str = "it went wrong", **more: object) -> Event:
    return Event(**{"kind": kind, "log": 0, "line": line, "text": text, **more})  # type: ignore[arg-type]


def _raising(raised: Raised = _ERROR, process: Process = NOBODY) -> Event:
    return _event(Kind.EXCEPTION, raised.line, raised.headline, raised=raised, process=process)


def _found(event: Event, certainty: str = "unknown error", root: Raised | None = None) -> Explanation:
    verdict = Verdict(event, certainty, "it is the first exception", root or event.raised)
    return Explanation(verdict, logs=_LOGS)


def _lost(rank: int) -> Event:
    lost = Match(_entry("consequence", title="A connection to another rank was lost"))
    return _event(line=900 + rank, process=Process(rank), match=lost)


# Failures --------------------------------------------------------------------------------------------------


def test_an_exception_of_the_users_own_code_gets_its_line_and_no_guess() -> None:
    found = _found(_raising(process=Process(3, host="node-b")))
    assert as_text(found).splitlines() == [
        "unknown error: rank 3 on node-b: ValueError",
        "  | ValueError: learning rate 3.0 is out of range [0, 1]",
        "  at /home/…/projects/training/code/train.py:12, in step (train.log, line 812)",
        "Do:",
        "  1. Look at /home/alice/work/projects/training/code/train.py:12, in step:",
        "     check(lr)",
    ]


def test_a_remedy_that_the_exception_states_is_quoted() -> None:
    raised = replace(
        _ERROR, message="No room. Please set `max_split_size_mb`. Please report this.", frames=()
    )
    assert as_text(_found(_raising(raised))).splitlines()[-1] == (
        "  1. The error says: \"Please set 'max_split_size_mb'.\""
    )
    assert "Do:" not in as_text(_found(_raising(replace(_ERROR, frames=()))))


def test_a_known_cause_is_told_with_why_what_followed_and_what_to_do() -> None:
    entry = _entry(
        why="Another process listens on port {port}.", do=["End it: `kill {pid}`.", "Use another."]
    )
    event = _event(
        text="EADDRINUSE", process=Process(0), match=Match(entry, {"port": "29500", "pid": "`; x"})
    )
    lost = (_lost(1), _lost(2), _lost(3))
    found = replace(_found(event, "known cause"), consequences=lost)
    assert as_text(found).splitlines() == [
        "known cause: rank 0: The port is taken",
        "  | EADDRINUSE",
        "  (train.log, line 812)",
        "Why: Another process listens on port 29500.",
        "Then: A connection to another rank was lost (ranks 1 to 3, 3 times)",
        "Do:",
        "  1. End it: `kill '; x`.",
        "  2. Use another.",
    ]


@pytest.mark.parametrize(
    ("ranks", "facts", "logs", "where"),
    [
        ([0, 1, 2], {"peer": "3"}, _LOGS, "this log: look at rank 3, which wrote nothing here."),
        ([0, 1, 3], {}, _LOGS, "this log: look at rank 2, which wrote nothing here."),
        ([0, 1], {"peer": "1"}, _LOGS, "this log: look at rank 1."),
        (
            [0, 1],
            {"peer": "10.0.0.7"},
            _LOGS * 2,
            "these logs: look at the other ranks' logs from before that",
        ),
        ([], {}, _LOGS, "this log: look at the other ranks' logs from before that time."),
    ],
)
def test_a_consequence_says_where_to_look(
    ranks: list[int], facts: dict[str, str], logs: tuple[Log, ...], where: str
) -> None:
    event = _event(match=Match(_entry("consequence", why="never shown"), facts))
    found = replace(_found(event, "consequence"), consequences=tuple(map(_lost, ranks)), logs=logs)
    text = as_text(found)
    assert f"The cause is not in {where}" in " ".join(text.split())
    assert "never shown" not in text


def test_the_exception_to_look_at_stands_for_the_one_that_it_became() -> None:
    raised = Raised("RuntimeError", "worker 0 failed", 820, earlier=_ERROR)
    library = _event(Kind.LIBRARY, 800, "NCCL WARN no route")
    found = _found(_raising(raised), root=_ERROR)
    assert found.verdict is not None
    lines = as_text(replace(found, verdict=replace(found.verdict, by=library))).splitlines()
    assert lines[0] == "unknown error: ValueError"
    assert "line 812)" in " ".join(lines)
    assert "  which became RuntimeError: worker 0 failed" in lines
    assert "  see also line 800: NCCL WARN no route" in lines


def test_long_paths_do_not_push_the_end_of_a_message_out() -> None:
    message = f"{'/site-packages' * 20}/flash_attn.so: undefined symbol: _ZN3c105ErrorC2E"
    text = as_text(_found(_raising(replace(_ERROR, message=message))))
    assert "| ValueError: /site-packages/…/flash_attn.so: undefined symbol:\n" in text
    assert "| _ZN3c105ErrorC2E\n" in text


def test_what_the_same_process_said_next_is_not_told_as_what_followed() -> None:
    found = _found(_raising(process=Process(1)))
    assert "Then: " not in as_text(replace(found, consequences=(_lost(1), _event(line=900))))


def test_the_place_of_a_consequence_is_nothing_to_do() -> None:
    assert "Look at" not in as_text(_found(_raising(), "consequence"))


def test_a_headline_that_only_announces_gets_the_next_line() -> None:
    raised = replace(_ERROR, message="Error(s) in loading:", more=("Missing key: a.b", "and more"))
    assert "| ValueError: Error(s) in loading: Missing key: a.b\n" in as_text(_found(_raising(raised)))


@pytest.mark.parametrize(
    ("event", "title"),
    [
        (_event(Kind.KILLED, code=-9), "ended by SIGKILL"),
        (_event(Kind.ENDED, code=3), "ended with exit code 3"),
        (_event(Kind.STALL), "the job makes no progress"),
        (_event(Kind.ERROR), "the first line that states an error"),
    ],
)
def test_what_happened_without_an_exception(event: Event, title: str) -> None:
    assert as_text(_found(event)).splitlines()[0] == f"unknown error: {title}"


def test_time_attempt_and_lines_counted_from_the_end() -> None:
    log = Log("train.log", lines=1000, newest_first=True)
    event = _event(time=1_700_000_000.0, attempt=1)
    text = as_text(replace(_found(event), logs=(log,), attempts=3))
    assert "(train.log, line 189, 22:13:20, attempt 2 of 3)" in text


def test_what_a_launcher_reports_has_no_line() -> None:
    event = _event(Kind.ENDED, log=LAUNCHER, process=Process(1), code=1)
    assert "(as reported)" in as_text(_found(event))
    assert as_json(_found(event))["verdict"]["line"] is None


# No failure ------------------------------------------------------------------------------------------------


def test_nothing_wrong_takes_one_line_and_notices_another() -> None:
    worked = _event(Kind.STEP, 1200, "step 400 loss 0.3")
    fine = Explanation(None, logs=_LOGS, worked=worked)
    assert as_text(fine) == "No failure in 1,234 lines; last: step 400 loss 0.3"
    notices = (_event(match=Match(_entry("notice", title="No IPv6 here"))),) * 3
    assert as_text(replace(fine, notices=notices)).splitlines()[1:] == ["Harmless: No IPv6 here (3 times)"]
    assert as_text(replace(fine, worked=None)) == "No failure in 1,234 lines, but no sign of work either."
    assert as_text(Explanation(None)).startswith("The log is empty.")


@pytest.mark.parametrize(
    ("launcher", "stop", "worked", "commands"),
    [
        ("", "Loading checkpoint", True, ["py-spy dump --pid PID", "dmesg -T | grep -i killed"]),
        (
            "slurm",
            "Loading",
            True,
            ["py-spy dump --pid PID", "sacct -j JOB --format=JobID,State,ExitCode,MaxRSS"],
        ),
        (
            "kubernetes",
            "Initializing process group",
            False,
            ["py-spy dump --pid PID", "rallypoint status", "kubectl describe pod POD"],
        ),
    ],
)
def test_a_log_that_stops_says_where_and_how_to_see_more(
    launcher: str, stop: str, worked: bool, commands: list[str]
) -> None:
    found = Explanation(None, stop=_event(Kind.BEGIN, 1234, stop), logs=_LOGS, launcher=launcher)
    text = as_text(replace(found, worked=_event(Kind.STEP) if worked else None))
    where = "in the midst of work" if worked else "before any work"
    assert text.startswith(f"No failure in 1,234 lines, but the log stops {where}:\n  | {stop}\n")
    assert re.findall("`([^`]*)`", text) == commands


def test_what_could_not_be_read_is_named() -> None:
    found = Explanation(None, logs=_LOGS, unreadable=(("model.log", "binary, not text"), ("b.log", "denied")))
    assert as_text(found).splitlines()[-1] == "Not read: model.log (binary, not text), b.log (denied)"


# --all and JSON --------------------------------------------------------------------------------------------


def test_all_adds_the_reason_and_everything_else() -> None:
    aside = _event(text="a warning")
    found = replace(
        _found(_raising(Raised("RuntimeError", "x", 9, earlier=_ERROR))),
        consequences=tuple(_lost(rank) for rank in range(4)),
        notices=tuple(_event(text=f"notice {number:02}") for number in range(25)),
        earlier=(_event(Kind.KILLED, code=-9),),
        set_aside={aside: "it was logged as a warning only"},
    )
    text = as_text(found, everything=True)
    assert text.startswith(as_text(found) + "\n\nChosen because: it is the first exception\n")
    for part in (
        "Exceptions, the first one first\n  - ValueError: learning rate",
        "What followed\n  - A connection to another rank was lost (ranks 0 to 3, 4 times,",
        "Harmless\n  - notice 00",
        "  - notice 19\n  and 5 more",
        "First failures of earlier attempts\n  - ended by SIGKILL",
        "Without effect\n  - a warning: it was logged as a warning only",
    ):
        assert f"\n{part}" in text


def test_the_json_has_stable_keys_and_everything_that_the_text_has() -> None:
    event = _raising(Raised("RuntimeError", "x", 9, earlier=_ERROR), Process(3, host="node-b"))
    found = replace(_found(event, root=_ERROR), stop=_event(), unreadable=(("a.log", "denied"),))
    document = json.loads(json.dumps(as_json(found)))
    assert document.keys() == {
        *("found", "lines", "launcher", "attempts", "verdict", "consequences", "notices", "earlier"),
        *("set_aside", "stop", "worked", "logs", "unreadable"),
    }
    verdict = document["verdict"]
    assert (verdict["headline"], verdict["line"]) == ("ValueError: " + _ERROR.message, 812)
    assert (verdict["rank"], verdict["host"], verdict["certainty"]) == (3, "node-b", "unknown error")
    assert [each["type"] for each in verdict["exceptions"]] == ["ValueError", "RuntimeError"]
    assert verdict["do"] == [
        "Look at /home/alice/work/projects/training/code/train.py:12, in step: check(lr)"
    ]
    assert document["stop"].keys() < verdict.keys()
    assert document["unreadable"] == [{"name": "a.log", "reason": "denied"}]


# Width -----------------------------------------------------------------------------------------------------

_TEXTS = st.text(max_size=300) | st.sampled_from([_EVIL * 20, "word " * 99, "x" * 2000, "/a/b" * 90])


@settings(max_examples=150)
@given(st.lists(_TEXTS, min_size=8, max_size=8), st.integers(60, 120), st.booleans())
def test_no_text_of_a_log_is_obeyed_or_wider_than_the_terminal(
    texts: list[str], width: int, everything: bool
) -> None:
    frame = QuotedFrame(texts[0], 7, texts[1], texts[2])
    raised = Raised(texts[3][:50], texts[4], 8, (texts[5],), (frame,))
    process = Process(3, host=texts[6][:90])
    found = replace(
        _found(_raising(raised, process)),
        consequences=(_event(text=texts[7]), _lost(1)),
        logs=(Log(texts[5] or "x", lines=9),),
        unreadable=((texts[0], texts[7]),),
    )
    lines = as_text(found, width, everything=everything).split("\n")
    assert all(line.isprintable() for line in lines)
    assert max(map(columns, lines)) <= width
    assert len(lines) <= 20 or everything or width < 80


def test_the_longest_answer_has_20_lines() -> None:
    entry = _entry(why="why " * 60, do=["do it " * 33] * 3, title="a title " * 30)
    event = _event(text="word " * 400, match=Match(entry), raised=replace(_ERROR, message="word " * 400))
    found = replace(
        _found(event, "known cause", _ERROR),
        consequences=(_event(text="word " * 99, process=Process(2)), _lost(1)),
        logs=(Log("/long" * 40, lines=1),),
        unreadable=(("x" * 200, "y" * 200),),
    )
    assert found.verdict is not None
    full = replace(found, verdict=replace(found.verdict, by=_event(text="word " * 99)))
    assert len(as_text(full).splitlines()) <= 20


def test_every_command_of_the_knowledge_base_is_kept_whole() -> None:
    for entry in knowledge().entries:
        text = as_text(_found(_event(match=Match(entry)), "known cause"), 60)
        shown = " ".join(as_json(_found(_event(match=Match(entry))))["verdict"]["do"][:1])
        for command in re.findall("`[^`]*`", shown):
            assert command in text, entry.id


@pytest.mark.parametrize(
    ("path", "most", "short"),
    [
        ("/home/alice/very/deep/train.py", 30, "/home/alice/very/deep/train.py"),
        ("/home/alice/very/deep/train.py", 24, "/home/…/deep/train.py"),
        ("/home/alice/very/deep/train.py", 18, "/home/…/train.py"),
        ("C:\\Users\\me\\deep\\train.py", 16, "C:\\…/train.py"),
        ("x" * 60, 24, "xxxx...xxxxx"),
        ("a\x1b/b", 30, "a\\x1b/b"),
    ],
)
def test_a_path_is_shortened_in_its_middle(path: str, most: int, short: str) -> None:
    assert short_path(path, most) == short


def test_wrapping() -> None:
    assert wrapped("run `a b c d e f` now", 10, "> ", commands=True) == ["> run", "  `a b c d e f`", "  now"]
    assert wrapped("run `a b c d", 8) == ["run `a b", "c d"]
    assert wrapped("配置配置配置", 8) == ["配置配置", "配置"]
    assert wrapped("", 80, "Why: ") == []
    assert clock(1_700_000_000.0) == "22:13:20"
