"""The command line in this process: a new interpreter for each call would take too long."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

from rallypoint.cli.main import call
from rallypoint.errors import RallypointError, UsageError


class Outcome(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str
    exception: RallypointError | None

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()

    @property
    def said(self) -> str:
        """What a user reads beside the data."""
        return f"{self.stderr}{self.exception or ''}"


def invoke(*words: str, text: str | bytes = "", environ: Mapping[str, str] | None = None) -> Outcome:
    """Call `rallypoint` with these words, and the text on standard input.

    Bytes on standard output that are no text stand in the outcome as Python escapes them (PEP 383).
    """
    written, err, error = io.BytesIO(), io.StringIO(), None
    out = io.TextIOWrapper(written, "utf-8", "surrogateescape", newline="", write_through=True)
    stdin = io.TextIOWrapper(io.BytesIO(text if isinstance(text, bytes) else text.encode()))
    with (
        mock.patch("sys.stdin", stdin),
        mock.patch.dict(os.environ, environ or {}),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            code = call(list(words))
        except SystemExit as end:
            code = int(end.code or 0)
        except RallypointError as problem:
            code, error = 2 if isinstance(problem, UsageError) else 1, problem
    return Outcome(code, written.getvalue().decode(errors="surrogateescape"), err.getvalue(), error)
