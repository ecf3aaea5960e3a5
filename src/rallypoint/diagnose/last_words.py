"""What `rallypoint run` says at the end of a failed job: the cause, what to do first, and where the rest is.

The launcher does not see what its ranks print: that goes straight to the terminal. So the explanation is made
from the exceptions that the ranks have reported, from how they ended, and from torchrun's files, if the user
has asked for them. It has to be about the rank that `rallypoint.launch.blame` names; else nothing is said.
"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from rallypoint.diagnose.explain import Explanation, Log, explain
from rallypoint.diagnose.explain.evidence import Incident
from rallypoint.diagnose.explain.explanation import Verdict
from rallypoint.diagnose.explain.reading import log_of_failure, open_log, told_by_name
from rallypoint.diagnose.explain.words import as_text, describe_writers
from rallypoint.launch.blame import FailureSummary
from rallypoint.launch.reports import Exit, Failure
from rallypoint.text import LONGEST_SENTENCE, excerpt, printable

_REPORT: Final = "rallypoint-report-"
_KEPT_SECONDS: Final = 7 * 24 * 3600


def explain_failure(
    blame: FailureSummary, failures: Sequence[Failure], files: Sequence[Path] = ()
) -> Explanation | None:
    """Why the rank that is blamed has failed; None if nothing is known that goes beyond the blame itself.

    `files` are logs of ranks. They are read for ranks that have reported no exception: those of the others
    would only repeat it.
    """
    if blame.follows or (blame.cause is None and blame.exit is None):
        return None  # a server or an agent, or something that nobody has reported: all that is known followed
    if blame.cause is not None and blame.cause.who.rank < 0 and "\nhint: " in blame.cause.message:
        return None  # an error of Rallypoint's says itself what to do
    told = {each.who.rank for each in failures}
    silent = [path for path in files if told_by_name(path)[0] not in told]
    everything = [*map(log_of_failure, failures), *_of_exit(blame.exit), *map(open_log, silent)]
    found = explain(everything)
    if not _is_about(blame, found.verdict):
        own = [path for path in silent if told_by_name(path)[0] == blame.rank]
        of_cause = [log_of_failure(blame.cause)] if blame.cause is not None else []
        found = explain([*of_cause, *_of_exit(blame.exit), *map(open_log, own)])
    return found if _is_about(blame, found.verdict) and _action(found) else None


def last_words(found: Explanation, report: str, headline: str = "") -> list[str]:
    """Three lines; two if there is no report. What the headline of the failure says is not repeated."""
    verdict = found.verdict
    assert verdict is not None  # explain_failure sees to that
    who = describe_writers(verdict.incident)
    what = excerpt(verdict.incident.title, LONGEST_SENTENCE)
    cause = "the error above" if what in headline else f"{f'{who}: ' if who else ''}{what}"
    lines = [
        f"cause ({verdict.sure}): {cause}",
        f"do first: {_action(found)}",
        *([f"whole report: {report}"] if report else []),
    ]
    return [printable(line) for line in lines]


def _is_about(blame: FailureSummary, verdict: Verdict | None) -> bool:
    if verdict is None or not _says_enough(verdict.incident):
        return False
    ranks = verdict.incident.ranks
    return blame.rank in ranks if ranks else blame.rank < 0


def _says_enough(incident: Incident) -> bool:
    """Whether it says more than that something failed: SIGABRT does, an exit code does not."""
    is_of_process = incident.cause is not None and incident.cause.part == "process"
    return incident.role in ("cause", "symptom") or is_of_process


def _action(found: Explanation) -> str:
    """What to do first; empty if the explanation has nothing to say to that."""
    incident: Incident | None = found.verdict.incident if found.verdict is not None else None
    if incident is None:
        return ""
    # This is what `rallypoint run` says: it need not be suggested for finding the rank that failed first.
    if others := [do for do in incident.do if "`rallypoint run train.py` names" not in do]:
        return others[0]
    raised = incident.raised
    return f"look at {raised.place}" if raised is not None and raised.place is not None else ""


def _of_exit(ended: Exit | None) -> list[Log]:
    """The end of a rank that has reported nothing, in torchrun's own words, which are known."""
    if ended is None:
        return []
    who = f"local_rank: {ended.local_rank} (pid: {ended.pid}) of binary: python"
    line = f"failed (exitcode: {ended.code}) {who}\n"
    return [Log("torchrun", [line.encode()], ended.rank, modified=ended.time)]


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
            file.write(as_text(replace(found, logs=tuple(map(printable, found.logs)))) + "\n")
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
