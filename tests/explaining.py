"""For the tests of `rallypoint explain`: a small knowledge base, and logs as texts."""

from __future__ import annotations

import re
import textwrap

from rallypoint.diagnose.explain import Explanation, Log, explain
from rallypoint.diagnose.explain.knowledge import Cause


def _cause(
    name: str,
    title: str,
    role: str,
    sure: str,
    *patterns: str,
    what: str = "What.",
    do: tuple[str, ...] = ("Do it.",),
    where: tuple[str, ...] = (),
    context: str = "",
    over: tuple[str, ...] = (),
) -> Cause:
    found = tuple(map(re.compile, patterns))
    seen = (re.compile(context),) if context else ()
    sources = ("pytorch/pytorch#1",)
    return Cause(name, title, "store", role, sure, "", found, what, "Why.", do, sources, where, seen, over)


CAUSES = (
    _cause(
        *("port-in-use", "The port is taken", "cause", "certain"),
        *(r"EADDRINUSE.*?port (?P<port>\d+)", "EADDRINUSE"),
        what="Another process holds port[ {port}].",
        do=("Use another port[ than {port}].", "End the other process."),
    ),
    _cause(
        *("high-port", "The port is one that the system hands out", "cause", "likely"),
        r"EADDRINUSE.*?port (?P<port>\d+)",
        where=("port >= 32768",),
        over=("port-in-use",),
    ),
    _cause("gpu-memory", "The memory of a GPU is full", "cause", "certain", "CUDA out of memory"),
    _cause(
        *("stale-nccl", "NCCL found the id of an earlier try", "cause", "possible", "ncclInternalError"),
        context="stale id",
    ),
    _cause(
        *("peer-gone", "A connection to another rank was lost", "symptom", "certain"),
        *("Connection closed by peer", "Broken pipe"),
    ),
    _cause(
        *("child-failed", "torchrun ended because a rank failed", "wrapper", "certain"),
        *("ChildFailedError", r"failed \(exitcode: \d+\)"),
    ),
    _cause("no-ipv6", "IPv6 is off", "notice", "certain", "Address family not supported"),
)


def log_of_text(text: str, name: str = "log") -> Log:
    return Log(name, [text.encode(errors="surrogateescape")])


def report_of(*texts: str | Log) -> Explanation:
    """What is said of some logs, by the small knowledge base."""
    logs = [
        text if isinstance(text, Log) else log_of_text(dedent(text), f"{index}.log")
        for index, text in enumerate(texts)
    ]
    return explain(logs, CAUSES)


def dedent(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


def traceback(line: str, prefix: str = "", file: str = "train.py") -> str:
    """A traceback that ends with a line, each line of it behind a prefix."""
    lines = ["Traceback (most recent call last):", f'  File "{file}", line 8, in train', "    step()", line]
    return "".join(f"{prefix}{each}\n" for each in lines)
