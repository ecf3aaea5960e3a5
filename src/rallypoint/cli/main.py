"""The `rallypoint` command: collects the subcommands, and turns errors into messages and exit codes."""

from __future__ import annotations

import errno
import io
import os
import sys

import typer

import rallypoint
from rallypoint.cli import (
    bench,
    doctor,
    enable,
    explain,
    kv,
    relay,
    run,
    serve,
    status,
    timeline,
    torch,
    verify,
    web,
)
from rallypoint.errors import RallypointError, UsageError

app = typer.Typer(
    name="rallypoint",
    help="The meeting place of a distributed PyTorch job.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("relay")(relay.relay)
app.command("run", context_settings=run.CONTEXT)(run.run)
app.command("enable")(enable.enable)
app.command("disable")(enable.disable)
app.command("verify")(verify.verify)
app.command("status")(status.status)
app.command("web")(web.web)
app.command("timeline")(timeline.timeline)
app.command("doctor")(doctor.doctor)
app.command("explain")(explain.explain)
app.add_typer(kv.app, name="kv")
app.add_typer(bench.app, name="bench")
app.add_typer(torch.app, name="torch")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rallypoint {rallypoint.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and end."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line; an error of ours becomes a message on standard error and exit code 1 or 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Where both streams go to one log, what is said about a report comes behind the report.
        sys.stdout.reconfigure(line_buffering=True)
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # at the interpreter's end, nobody could say what failed
    except RallypointError as error:
        print(f"rallypoint: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {error.hint}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except OSError as error:  # ours are caught above: what is left is a standard stream
        if error.errno != errno.EPIPE:  # a reader that has seen enough is no news
            print(f"rallypoint: cannot write to standard output: {error.strerror}", file=sys.stderr)
        os._exit(1)  # not by way of the interpreter's end, which would try to write it again
