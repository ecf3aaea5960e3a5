"""An explanation as text for a terminal of 80 columns, and as JSON. Pure.

Text from a log is written so that a terminal obeys nothing in it. Text between backticks is to be pasted, so
it is never broken, even if its line gets longer.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from rallypoint.diagnose.explain.advice import advise
from rallypoint.diagnose.explain.evidence import Incident
from rallypoint.diagnose.explain.explanation import Explanation, Stop, Verdict
from rallypoint.diagnose.explain.suspects import Suspect
from rallypoint.text import excerpt, printable, ranks_text, shown

WIDTH: Final = 80
_EMPTY: Final = (
    "The log is empty. Launchers write to standard error as well: `torchrun ... 2>&1 | tee train.log`."
)
_OUTLIVED: Final = (
    "It was said in warnings only, or the job went on after it, and nothing shows that a process ended "
    "badly. If the job hangs, or has failed all the same:"
)
_SHOWS_NOTHING: Final = "shows neither training nor an end. It stops at"
_ENDS: Final = "ends in the midst of the work, and with"
_MIDST: Final = (
    "The log ends in the midst of the work: good news, if the job is still running. If it is not, it was "
    "ended without a word (`dmesg -T | grep -i killed`, `sacct -j JOB`, `kubectl describe pod POD`). If it "
    "hangs, `py-spy dump --pid PID` shows where each rank waits."
)
_PASTED: Final = re.compile(r"`[^`]*`")
_HELD: Final = "\0"
"""Stands for a blank at which a line must not be broken; no printable text has it."""
_MOST_ROWS: Final = 8
_LONGEST_QUOTE: Final = 400
_LONGEST_TITLE: Final = 200
_ADVICE: Final = 3
_REPORTING: Final = (
    "If you find out what it was, open an issue: an entry of the knowledge base needs the lines of the log, "
    "the cause, and what helped."
)


def describe_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 1 to 7 and 9`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {ranks_text(ranks, _MOST_ROWS)}"


def describe_writers(incident: Incident) -> str:
    """The writers: ranks, else machines, else nothing."""
    ranks = [
        *([describe_ranks(incident.ranks)] if incident.ranks else []),
        *([f"local {describe_ranks(incident.local_ranks)}"] if incident.local_ranks else []),
    ]
    if ranks:
        where = f" on {shown(incident.hosts[0])}" if len(incident.hosts) == 1 else ""
        return " and ".join(ranks) + where
    hosts = [shown(host) for host in incident.hosts]
    more = f" and {len(hosts) - 3:,} more" if len(hosts) > 3 else ""
    return ", ".join(hosts[:3]) + more


# Text ------------------------------------------------------------------------------------------------------


def as_text(explanation: Explanation) -> str:
    """The whole explanation."""
    blocks = [*_verdict_blocks(explanation), *_rest_blocks(explanation)]
    return "\n\n".join("\n".join(block) for block in blocks)


def _verdict_blocks(explanation: Explanation) -> Iterator[list[str]]:
    verdict = explanation.verdict
    if verdict is None:
        yield _nothing(explanation)
        if explanation.suspects:
            advice = advise(explanation.suspects[0].text)
            yield _suspect_lines(explanation)
            yield ["What to do about the first", *_numbered([*advice.do, _REPORTING])]
        if explanation.stop is not None and explanation.stop.advice and not explanation.suspects:
            yield ["What it may be", *_prose(explanation.stop.advice.why, "  ")]
            yield ["What to do", *_numbered(explanation.stop.advice.do)]
        if not explanation.suspects:
            yield from (_notice(incident, explanation) for incident in explanation.notices[:_MOST_ROWS])
            if explanation.midst is not None and explanation.stop is None:
                yield _prose(_MIDST)
        return
    incident = verdict.incident
    yield [*_wrapped(_headline(verdict)), *_quote(incident, explanation)]
    if explanation.suspects:
        yield ["Lines that look like a cause, and are not known here", *_suspect_lines(explanation)]
    if incident.what:
        yield ["What happened", *_prose(incident.what, "  ")]
    yield ["Why" if incident.cause is not None else "What it may be", *_prose(incident.why, "  ")]
    yield [
        "What to do",
        *_numbered(incident.do if incident.cause is not None else [*incident.do, _REPORTING]),
    ]
    if explanation.stop is not None and explanation.stop.advice:
        yield [
            "Where it stood before",
            *_wrapped(excerpt(explanation.stop.text, _LONGEST_QUOTE), "  | "),
            *_prose("If it hung there:", "  "),
            *_prose(explanation.stop.advice.why, "    "),
            *(line for text in explanation.stop.advice.do for line in _prose(text, "    - ", "      ")),
        ]
    yield ["How sure", *_wrapped(f"{verdict.sure}: {'; '.join(verdict.reasons)}", "  ")]


def _headline(verdict: Verdict) -> str:
    incident = verdict.incident
    who = describe_writers(incident)
    if incident.cause is not None:
        return f"{who}: {incident.title}" if who else incident.title
    if incident.guessed:
        return f"{who}: this line states an error first" if who else "This line states an error first"
    if incident.role == "wrapper" and incident.raised is None:
        return f"{who}: no more is known than this" if who else "No more is known than this"
    what = "an error that is not known here"
    return f"{who} failed first, with {what}" if who else f"The first failure is {what}"


def _notice(incident: Incident, explanation: Explanation) -> list[str]:
    """A notice in full, if there is no failure."""
    by_nature = incident.cause is not None and incident.cause.role == "notice"
    if incident.cause is None:
        return [
            *_wrapped(_with("An error that the job outlived", describe_writers(incident))),
            *_quote(incident, explanation),
        ]
    return [
        *_wrapped(_with(incident.title, describe_writers(incident))),
        *_quote(incident, explanation),
        *_prose(f"{incident.what} {incident.why}" if by_nature else f"{incident.what} {_OUTLIVED}", "  "),
        *_numbered(incident.do[:_ADVICE]),
    ]


def _quote(incident: Incident, explanation: Explanation) -> list[str]:
    first = incident.first
    lines = _wrapped(excerpt(incident.headline, _LONGEST_QUOTE), "  | ")
    if incident.raised is not None and incident.raised.place is not None and incident.role != "wrapper":
        lines += _wrapped(f"at {incident.raised.place}", "  | ")
    if incident.became is not None:
        message = excerpt(incident.became.message, _LONGEST_TITLE)
        lines += _wrapped(f"which became {incident.became.kind}: {message}", "  | ")
    return [*lines, *_wrapped(f"({explanation.logs[first.log]}, line {first.line:,})", "  ")]


def _nothing(explanation: Explanation) -> list[str]:
    if explanation.suspects:
        return _wrapped("Nothing in this log is known here. These lines look most like a cause:")
    if explanation.stop is not None:
        stop = explanation.stop
        return [
            *_wrapped(
                f"No known error was found, but the log {_ENDS if explanation.midst else _SHOWS_NOTHING}"
            ),
            *_wrapped(excerpt(stop.text, _LONGEST_QUOTE), "  | "),
            *_wrapped(f"({stop.log}, line {stop.line:,})", "  "),
        ]
    if not explanation.lines:
        return _wrapped(_EMPTY)
    size = f"{explanation.lines:,} lines" if explanation.lines != 1 else "1 line"
    if explanation.notices:
        return _wrapped(f"No failure was found in {size}. This was seen, and is mostly harmless:")
    return _wrapped(f"No error was found in {size}.")


def _rest_blocks(explanation: Explanation) -> Iterator[list[str]]:
    sections = (
        ("What followed from that", explanation.consequences),
        ("Also found; it may be a cause of its own", explanation.others),
        (
            "Also seen, mostly harmless",
            explanation.notices if explanation.verdict or explanation.suspects else (),
        ),
    )
    for heading, incidents in sections:
        if incidents:
            yield [heading, *_rows([(each.title, _who_and_how_often(each)) for each in incidents])]
    if explanation.other_tries and explanation.verdict is not None:
        this = explanation.verdict.attempt + 1
        tries = [
            (f"try {each.attempt + 1}: {each.incident.title}", describe_writers(each.incident))
            for each in explanation.other_tries
        ]
        yield [f"Other tries (the above is of try {this} of {explanation.attempts})", *_rows(tries)]


def _rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Titles, each with its writers; the first few of many."""
    lines = []
    for title, who in rows[:_MOST_ROWS]:
        lines += _wrapped(_with(excerpt(title, _LONGEST_TITLE), who), "  ", "    ")
    more = len(rows) - _MOST_ROWS
    return [*lines, f"  and {more:,} more"] if more > 0 else lines


def _who_and_how_often(incident: Incident) -> str:
    times = f"{incident.count:,} times" if incident.count > 1 else ""
    return ", ".join(each for each in (describe_writers(incident), times) if each)


def _with(title: str, who: str) -> str:
    return f"{title} ({who})" if who else title


def _suspect_lines(explanation: Explanation) -> list[str]:
    return [line for each in explanation.suspects for line in _suspect(each)]


def _suspect(suspect: Suspect) -> list[str]:
    who = f"rank {suspect.rank}, " if suspect.rank is not None else ""
    if suspect.rank is None and suspect.local_rank is not None:
        who = f"local rank {suspect.local_rank}, "
    return [
        *_wrapped(excerpt(suspect.text, _LONGEST_QUOTE), "  | "),
        *_wrapped(f"({who}{suspect.log}, line {suspect.line:,})", "  "),
    ]


def _numbered(texts: Iterable[str]) -> list[str]:
    return [
        line
        for number, text in enumerate(texts, 1)
        for line in _prose(text, f"  {number}. ", " " * (4 + len(str(number))))
    ]


def _prose(text: str, indent: str = "", later: str | None = None) -> list[str]:
    """Lines of a text of the knowledge base: commands between backticks are kept whole."""
    held = _PASTED.sub(lambda found: found[0].replace(" ", _HELD), printable(text))
    return [line.replace(_HELD, " ") for line in _filled(held, indent, later)]


def _wrapped(text: str, indent: str = "", later: str | None = None) -> list[str]:
    return _filled(printable(text), indent, later)


def _filled(text: str, indent: str, later: str | None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if later is None else later,
        break_long_words=False,
        break_on_hyphens=False,
    )


# JSON ------------------------------------------------------------------------------------------------------


def as_json(explanation: Explanation) -> dict[str, Any]:
    """The whole explanation; the guide describes it."""
    verdict = explanation.verdict
    return {
        "found": explanation.found,
        "known": verdict is not None and verdict.incident.cause is not None,
        "verdict": None if verdict is None else _verdict_json(verdict, explanation),
        "consequences": [_incident_json(each, explanation) for each in explanation.consequences],
        "others": [_incident_json(each, explanation) for each in explanation.others],
        "notices": [_incident_json(each, explanation) for each in explanation.notices],
        "other_tries": [_verdict_json(each, explanation) for each in explanation.other_tries],
        "suspects": list(map(asdict, explanation.suspects)),
        "stop": _stop_json(explanation.stop),
        "midst": _stop_json(explanation.midst),
        "attempts": explanation.attempts,
        "logs": list(dict.fromkeys(explanation.logs)),
        "lines": explanation.lines,
    }


def _stop_json(stop: Stop | None) -> dict[str, Any] | None:
    if stop is None:
        return None
    advice = {} if stop.advice is None else {"why": stop.advice.why, "do": list(stop.advice.do)}
    return {"text": stop.text, "log": stop.log, "line": stop.line, **advice}


def _verdict_json(verdict: Verdict, explanation: Explanation) -> dict[str, Any]:
    incident = verdict.incident
    return {
        **_incident_json(incident, explanation),
        **{name: getattr(incident, name) for name in ("what", "why", "do")},
        "sources": list(incident.cause.sources) if incident.cause is not None else [],
        "sure": verdict.sure,
        "reasons": list(verdict.reasons),
        "order": verdict.order,
        "attempt": verdict.attempt,
    }


def _incident_json(incident: Incident, explanation: Explanation) -> dict[str, Any]:
    first, raised = incident.first, incident.raised
    return {
        "id": incident.cause.id if incident.cause is not None else None,
        "part": incident.cause.part if incident.cause is not None else None,
        **{
            name: getattr(incident, name)
            for name in ("title", "role", "facts", "ranks", "local_ranks", "hosts", "count", "text")
        },
        "time": None if first.time is None else first.time.isoformat(),
        "log": explanation.logs[first.log],
        "line": first.line,
        "exception": None if raised is None else raised.kind,
        "place": None if raised is None or raised.place is None else str(raised.place),
    }
