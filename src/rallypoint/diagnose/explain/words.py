"""A report as text for a terminal of 80 columns, and as JSON. Pure.

Whatever comes from a log is written so that a terminal obeys nothing in it. What stands between backticks is
to be pasted, so it is never broken; only for that a line may be longer.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from rallypoint.diagnose.explain.report import Report, Told, Verdict
from rallypoint.diagnose.explain.suspects import Suspect
from rallypoint.text import excerpt, printable, ranks_text

WIDTH: Final = 80
_OWN_ERROR: Final = "It is an ordinary error of Python code, and not one of distributed training."
_EMPTY: Final = (
    "The log is empty. Launchers write to standard error as well: `torchrun ... 2>&1 | tee train.log`."
)
_ONLY_WARNED: Final = (
    "It was said in warnings only, and nothing shows that a process ended badly. If the job hangs, or has "
    "failed all the same:"
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


def describe_writers(told: Told) -> str:
    """Who said it: ranks, else machines, else nothing."""
    if told.ranks:
        where = f" on {printable(told.hosts[0])}" if len(told.hosts) == 1 else ""
        return describe_ranks(told.ranks) + where
    hosts = [printable(host) for host in told.hosts]
    more = f" and {len(hosts) - 3:,} more" if len(hosts) > 3 else ""
    return ", ".join(hosts[:3]) + more


# Text ------------------------------------------------------------------------------------------------------


def as_text(report: Report) -> str:
    """The whole report."""
    blocks = [*_verdict_blocks(report), *_rest_blocks(report)]
    return "\n\n".join("\n".join(block) for block in blocks)


def _verdict_blocks(report: Report) -> Iterator[list[str]]:
    verdict = report.verdict
    if verdict is None:
        yield _nothing(report)
        if not report.suspects:
            yield from (_notice(told, report) for told in report.notices[:_MOST_ROWS])
        return
    told = verdict.told
    yield [*_wrapped(_headline(verdict)), *_quote(told, report)]
    if told.cause is not None:
        yield ["What happened", *_prose(told.what, "  ")]
        yield ["Why", *_prose(told.why, "  ")]
        yield ["What to do", *_numbered(told.do)]
    else:
        yield ["What to do", *_numbered(_advice(told))]
    yield ["How sure", *_wrapped(f"{verdict.sure}: {'; '.join(verdict.reasons)}", "  ")]


def as_advice(report: Report) -> str:
    """Only what is known of the first cause, for the end of a failed job; empty if nothing is."""
    if report.verdict is None or report.verdict.told.cause is None:
        return ""
    told = report.verdict.told
    return "\n".join(
        [
            *_prose(f"{told.title}: {told.what}"),
            *_prose(f"why: {told.why}"),
            "what to do:",
            *_numbered(told.do[:_ADVICE]),
        ]
    )


def _headline(verdict: Verdict) -> str:
    told = verdict.told
    who = describe_writers(told)
    if told.cause is not None:
        return f"{who}: {told.title}" if who else told.title
    what = "an error that is not known here"
    return f"{who} failed first, with {what}" if who else f"The first failure is {what}"


def _notice(told: Told, report: Report) -> list[str]:
    """What is mostly harmless, where there is nothing else to tell."""
    who = describe_writers(told)
    by_nature = told.cause is not None and told.cause.role == "notice"
    return [
        *_wrapped(f"{told.title} ({who})" if who else told.title),
        *_quote(told, report),
        *_prose(f"{told.what} {told.why}" if by_nature else f"{told.what} {_ONLY_WARNED}", "  "),
        *_numbered(told.do[:_ADVICE]),
    ]


def _quote(told: Told, report: Report) -> list[str]:
    first = told.first
    lines = _wrapped(excerpt(told.headline, _LONGEST_QUOTE), "  | ")
    if told.raised is not None and told.raised.place is not None and told.role != "wrapper":
        lines += _wrapped(f"at {told.raised.place}", "  | ")
    if told.became is not None:
        lines += _wrapped(
            f"which became {told.became.kind}: {excerpt(told.became.message, _LONGEST_TITLE)}", "  | "
        )
    return [*lines, *_wrapped(f"({report.logs[first.log]}, line {first.line:,})", "  ")]


def _advice(told: Told) -> list[str]:
    if told.raised is None or told.raised.place is None:
        return [_REPORTING]
    advice = "Look at the place above: all that came after it may be its consequence."
    return [f"{advice} {_OWN_ERROR}"] if told.raised.is_plain else [advice, _REPORTING]


def _nothing(report: Report) -> list[str]:
    if report.suspects:
        return _wrapped("Nothing in this log is known here. These lines look most like a cause:")
    if not report.lines:
        return _wrapped(_EMPTY)
    size = f"{report.lines:,} lines" if report.lines != 1 else "1 line"
    if report.notices:
        return _wrapped(f"No failure was found in {size}. This was seen, and is mostly harmless:")
    return _wrapped(f"No error was found in {size}.")


def _rest_blocks(report: Report) -> Iterator[list[str]]:
    if report.suspects:
        known = [] if report.verdict is None else ["Lines that look like a cause, and are not known here"]
        yield [*known, *(line for each in report.suspects for line in _suspect(each))]
        if report.verdict is None:
            yield _wrapped(_REPORTING)
    sections = (
        ("What followed from that", report.consequences),
        ("Also found; it may be a cause of its own", report.others),
        ("Also seen, mostly harmless", report.notices if report.found else ()),
    )
    for heading, rows in sections:
        if rows:
            yield [heading, *_rows(rows)]
    if report.other_tries and report.verdict is not None:
        tries = [line for each in report.other_tries[:_MOST_ROWS] for line in _try_row(each)]
        yield [_tries_heading(report), *tries, *_more(report.other_tries)]


def _tries_heading(report: Report) -> str:
    assert report.verdict is not None
    return f"Other tries (the above is of try {report.verdict.attempt + 1} of {report.attempts})"


def _try_row(verdict: Verdict) -> list[str]:
    return _row(f"try {verdict.attempt + 1}: {verdict.told.title}", describe_writers(verdict.told))


def _rows(rows: Sequence[Told]) -> list[str]:
    lines = [line for told in rows[:_MOST_ROWS] for line in _row(told.title, _who_and_how_often(told))]
    return [*lines, *_more(rows)]


def _more(rows: Sequence[object]) -> list[str]:
    return [f"  and {len(rows) - _MOST_ROWS:,} more"] if len(rows) > _MOST_ROWS else []


def _who_and_how_often(told: Told) -> str:
    times = f"{told.count:,} times" if told.count > 1 else ""
    return ", ".join(each for each in (describe_writers(told), times) if each)


def _row(title: str, who: str) -> list[str]:
    short = excerpt(title, _LONGEST_TITLE)
    return _wrapped(f"{short} ({who})" if who else short, "  ", "    ")


def _suspect(suspect: Suspect) -> list[str]:
    who = f"rank {suspect.rank}, " if suspect.rank is not None else ""
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
    """Lines of a text of the knowledge base: what is to be pasted is kept whole."""
    held = _PASTED.sub(lambda found: found[0].replace(" ", _HELD), printable(text))
    lines = _filled(held, indent, indent if later is None else later)
    return [line.replace(_HELD, " ") for line in lines]


def _wrapped(text: str, indent: str = "", later: str | None = None) -> list[str]:
    return _filled(printable(text), indent, indent if later is None else later)


def _filled(text: str, indent: str, later: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


# JSON ------------------------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    """The whole report; the guide describes it."""
    verdict = report.verdict
    return {
        "found": report.found,
        "known": verdict is not None and verdict.told.cause is not None,
        "verdict": None if verdict is None else _verdict_json(verdict, report),
        "consequences": [_told_json(told, report) for told in report.consequences],
        "others": [_told_json(told, report) for told in report.others],
        "notices": [_told_json(told, report) for told in report.notices],
        "other_tries": [_verdict_json(each, report) for each in report.other_tries],
        "suspects": [
            {"text": each.text, "log": each.log, "line": each.line, "rank": each.rank, "score": each.score}
            for each in report.suspects
        ],
        "attempts": report.attempts,
        "logs": list(report.logs),
        "lines": report.lines,
    }


def _verdict_json(verdict: Verdict, report: Report) -> dict[str, Any]:
    return {
        **_told_json(verdict.told, report),
        "what": verdict.told.what,
        "why": verdict.told.why,
        "do": verdict.told.do,
        "sources": list(verdict.told.cause.sources) if verdict.told.cause is not None else [],
        "sure": verdict.sure,
        "reasons": list(verdict.reasons),
        "order": verdict.order,
        "attempt": verdict.attempt,
    }


def _told_json(told: Told, report: Report) -> dict[str, Any]:
    first, raised = told.first, told.raised
    return {
        "id": told.cause.id if told.cause is not None else None,
        "title": told.title,
        "part": told.cause.part if told.cause is not None else None,
        "role": told.role,
        "facts": told.facts,
        "ranks": told.ranks,
        "hosts": told.hosts,
        "count": told.count,
        "time": None if first.time is None else first.time.isoformat(),
        "log": report.logs[first.log],
        "line": first.line,
        "text": told.text,
        "exception": None if raised is None else raised.kind,
        "place": None if raised is None or raised.place is None else str(raised.place),
    }
