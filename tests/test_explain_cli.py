"""`rallypoint explain`: what it prints, and how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import Outcome, invoke
from explaining import log_of_text, report_of, traceback
from rallypoint.cli import run
from rallypoint.diagnose.explain import explain, words
from rallypoint.diagnose.explain.knowledge import causes
from rallypoint.errors import UsageError
from rallypoint.launch import reports
from rallypoint.launch.reports import Reports
from rallypoint.text import excerpt

pytestmark = pytest.mark.windows

_LIBUV = "RuntimeError: use_libuv was requested but PyTorch was built without libuv support\n"
_ABORTED = "Fatal Python error: Aborted\n"
_KEYS = {
    *("found", "known", "verdict", "consequences", "others", "notices"),
    *("other_tries", "stop", "midst", "suspects", "attempts", "logs", "lines"),
}


def _explain(*arguments: str, text: str = "") -> Outcome:
    return invoke("explain", *arguments, text=text)


def test_a_known_error_from_standard_input() -> None:
    """By a real process: what it prints is UTF-8 or not, and its input is a pipe."""
    command = [sys.executable, "-m", "rallypoint", "explain"]
    done = subprocess.run(command, input=_LIBUV, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    for heading in ("What happened", "Why", "What to do", "How sure"):
        assert f"\n{heading}\n  " in done.stdout
    assert "(standard input, line 1)" in done.stdout
    assert done.stderr == ""


def test_nothing_found_is_exit_code_0(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("step 1 loss 0.5\n" * 3 + "Training finished\n")
    done = _explain(str(path))
    assert (done.exit_code, done.stdout) == (0, "No error was found in 4 lines.\n")


def test_a_log_that_ends_in_the_midst_of_steps_is_good_news_only_of_a_job_that_runs() -> None:
    text = "step 1 loss 0.5\nstep 2 loss 0.4\n"
    done = _explain(text=text)
    assert done.exit_code == 0
    assert done.stdout.startswith("No error was found in 2 lines.\n\nThe log ends in the midst of the work")
    stops = {name: json.loads(_explain("--json", text=text).stdout)[name] for name in ("stop", "midst")}
    assert stops == {"stop": None, "midst": {"text": "step 2 loss 0.4", "log": "standard input", "line": 2}}


def test_what_is_mostly_harmless_is_told_with_exit_code_0() -> None:
    late = (
        "[W1115 14:36:19.1 socket.cpp:764] [c10d] The IPv6 network addresses of (late-pod, 29781) cannot be "
    )
    late += "retrieved (gai error: -2 - Name or service not known).\n"
    done = _explain(text=f"{late}Setting OMP_NUM_THREADS environment variable for each process to be 1\n")
    assert done.exit_code == 0, done.stdout
    assert done.stdout.startswith(
        "No failure was found in 2 lines. This was seen, and is mostly harmless:\n\n"
    )
    assert "It was said in warnings only" in " ".join(done.stdout.split())
    assert "has failed all the same: 1. " in " ".join(done.stdout.split())
    assert "  (standard input, line 2)\n" in done.stdout
    content = json.loads(_explain("--json", text=late).stdout)
    assert (content["found"], content["verdict"]) == (False, None)
    assert [told["id"] for told in content["notices"]] == ["name-not-resolved"]


def test_an_unknown_error_is_said_to_be_unknown() -> None:
    done = _explain("-", text=traceback("ValueError: the learning rate is a banana", "[rank3]: "))
    assert done.exit_code == 1
    assert done.stdout.startswith("rank 3 failed first, with an error that is not known here\n")
    assert "  | at train.py, line 8, in train\n" in done.stdout


def test_json() -> None:
    done = _explain("--json", text=_LIBUV)
    content = json.loads(done.stdout)
    assert content.keys() == _KEYS
    assert content["known"]
    assert content["verdict"]["text"] == _LIBUV.strip()
    assert content["verdict"].keys() >= {"id", "title", "what", "why", "do", "sure", "reasons", "sources"}


def test_the_list_is_whole() -> None:
    lines = _explain("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [cause.id for cause in causes()]
    content = json.loads(_explain("--list", "--json").stdout)
    assert [entry["id"] for entry in content] == [cause.id for cause in causes()]
    assert content[0]["patterns"]


def test_wrong_usage() -> None:
    for arguments, message in {
        ("no-such.log",): "cannot read no-such.log: ",
        ("--list", "x.log"): "--list takes no files",
    }.items():
        done = _explain(*arguments)
        assert isinstance(done.exception, UsageError)
        assert message in done.exception.message
        assert done.exception.hint
        assert (done.stdout, done.stderr) == ("", "")


# The words -------------------------------------------------------------------------------------------------


def test_the_text_fits_into_80_columns_and_a_terminal_obeys_nothing_in_it() -> None:
    evil = "\x1b]0;title\x07\x08\x9b31m\u202e" + "word " * 100
    log = (
        traceback(f"ValueError: {evil}", "[rank3]: ")
        + f"[rank0]: RuntimeError: Connection closed by peer {evil}\n"
        + "(errno: 97 - Address family not supported by protocol)\n"
    )
    text = words.as_text(report_of(log))
    assert all(line.isprintable() and len(line) <= 80 for line in text.splitlines()), text
    assert json.loads(json.dumps(words.as_json(report_of(log))))["found"]


def test_what_is_to_be_pasted_is_kept_whole() -> None:
    for cause in causes():
        alone = replace(cause, context=(), role="cause", over=())
        report = explain([log_of_text(f"{cause.example}\n{_ABORTED}")], [alone])
        assert report.verdict is not None, cause.id
        text = words.as_text(report)
        for command in re.findall("`[^`]*`", " ".join(report.verdict.incident.do)):
            assert command in text
        long = [line for line in text.splitlines() if len(line) > 80]
        assert [line for line in long if "`" not in line and "  | " not in line] == [], cause.id


def test_a_long_text_is_cut_between_words() -> None:
    for text, cut in {
        "twelve signs": "twelve signs",
        "some more words": "some more …",
        "some mo words and": "some mo …",
        "some/more/words": "some/more/ …",
    }.items():
        assert excerpt(text, 12) == cut


@given(st.text(), st.integers(2, 50))
def test_a_text_is_cut_to_what_fits(text: str, most: int) -> None:
    cut = excerpt(text, most)
    assert len(cut) <= most
    assert cut == text or (cut.endswith(" …") and text.startswith(cut[:-2]))


def test_all_sections() -> None:
    end = "E1115 14:36:19.1 7 torch/x.py:869] failed (exitcode: 1) local_rank: 0 (pid: 1) of binary: python\n"
    log = (
        f"EADDRINUSE on port 29500\n{end}"
        + traceback("ValueError: no", "[rank3]: ")
        + f"(errno: 97 - Address family not supported)\n[rank0]: Broken pipe\n{end}"
    )
    text = words.as_text(report_of(log, "2026-11-15 14:36:19 - ERROR - CUDA out of memory\n"))
    for heading in (
        "What followed from that",
        "Also found; it may be a cause of its own",
        "Also seen, mostly harmless",
        "  try 1: The port is taken",
    ):
        assert f"\n{heading}\n" in f"{text}\n"
    assert "\n  A connection to another rank was lost (rank 0)\n" in text


def test_of_many_rows_the_first_are_shown() -> None:
    text = words.as_text(report_of("".join(traceback(f"{letter}Error: x") for letter in "ABCDEFGHIJKL")))
    assert "\n  IError: x\n  and 3 more" in text
    assert "JError" not in text


def test_lines_that_look_like_a_cause() -> None:
    text = words.as_text(report_of("fine\n[rank2]: it is a failure\n"))
    assert text.startswith("Nothing in this log is known here.")
    assert "  | it is a failure\n  (rank 2, 0.log, line 2)\n" in text


# At the end of `rallypoint run` ----------------------------------------------------------------------------


def test_a_failed_job_ends_with_what_is_known_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(reports.VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "2")
    error = ModuleNotFoundError("No module named 'banana'")
    reports.report_failure(ModuleNotFoundError, error, None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    blame = run._tell_failure(Reports(tmp_path), [])
    assert blame is not None
    run._explain(blame, Reports(tmp_path), "", 0.0)
    told = capsys.readouterr().err
    first, _, rest = told.rpartition("\n\n")
    assert "failed first: ModuleNotFoundError: No module named 'banana'" in first
    cause, action, report = rest.splitlines()
    assert re.fullmatch(r"cause \(certain\): rank 2 on \S+: A Python package is missing", cause)
    assert action.startswith("do first: Is the name right?")
    file = Path(report.removeprefix("whole report: "))
    assert "\nWhat to do\n  1. " in file.read_text()
    assert file.stat().st_mode & 0o077 == 0 or sys.platform == "win32"
