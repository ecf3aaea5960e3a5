"""The last lines of a failed `rallypoint run`: the cause, what to do first, and where the whole report is.

The launcher knows who failed first, from reports and not from words: `rallypoint.launch.blame`. So only that
process is explained: by its exception or its exit code, and by its own output where torchrun keeps that in
files. If nothing is known beyond the blame itself, nothing is printed: a wrong guess costs more than none.
"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rallypoint.explain import Explanation, explain
from rallypoint.explain.reading import Opener, told_by_name
from rallypoint.explain.report import as_text, steps_of, title_of
from rallypoint.launch.blame import FailureSummary
from rallypoint.text import LONGEST_SENTENCE, excerpt, printable, printable_lines

_REPORT: Final = "rallypoint-report-"
_KEPT_SECONDS: Final = 7 * 24 * 3600


def explain_failure(blame: FailureSummary, files: Sequence[Path] = ()) -> Explanation | None:
    """Why the process that is blamed has failed; None if nothing is known beyond the blame itself."""
    if blame.follows or (blame.cause is None and blame.exit is None):
        return None  # a server, or a failure that nobody has reported
    if blame.cause is not None and "\nhint: " in blame.cause.message:
        return None  # an error of Rallypoint's says itself what to do
    own = [path for path in files if told_by_name(path)[0] == blame.rank] if blame.cause is None else []
    found = explain(map(Opener().open, own), [blame.event])
    return found if found.verdict is not None and steps_of(found, found.verdict) else None


def last_words(found: Explanation, report: str) -> list[str]:
    """The cause if it is known, what to do first, and where the report is; the traceback is shown above."""
    verdict = found.verdict
    assert verdict is not None  # explain_failure sees to that
    lines = [f"do first: {steps_of(found, verdict, code=False)[0]}"]
    if verdict.certainty == "known cause":
        title = excerpt(title_of(verdict.event, verdict.root), LONGEST_SENTENCE)
        lines.insert(0, f"cause: {title}")
    if report:
        lines.append(f"whole report: {report}")
    return [printable(line) for line in lines]


# Files -----------------------------------------------------------------------------------------------------


def logs_since(folder: Path, began: float) -> list[Path]:
    """torchrun's files with what ranks have printed, of the run that began then; none if it made none."""
    found = [path for path in folder.glob("*/attempt_*/*/std*.log") if path.stat().st_mtime >= began]
    newest = max((path.parents[2] for path in found), key=lambda run: run.stat().st_mtime, default=None)
    in_order = sorted(path for path in found if path.parents[2] == newest and path.stat().st_size)
    last_try = max((told_by_name(path)[2] or 0 for path in in_order), default=0)
    return [path for path in in_order if (told_by_name(path)[2] or 0) == last_try]


def place_of_report(found: Explanation, files: Sequence[Path]) -> str:
    """The command that shows the report; without files for it, a file with the report, for a week."""
    if files:
        return f"rallypoint explain {shlex.quote(str(files[0].parents[2]))}"
    _remove_old()
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix=_REPORT, suffix=".txt", encoding="utf-8", delete=False
        ) as file:
            file.write(printable_lines(as_text(found)) + "\n")
        return file.name
    except OSError:
        return ""  # the disk may be full, which may be why the job has failed


def _remove_old() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_REPORT}*.txt"):
        try:
            if path.lstat().st_mtime < time.time() - _KEPT_SECONDS:
                path.unlink()
        except OSError:
            continue  # it is another user's, or gone
