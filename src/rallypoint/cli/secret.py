"""`rallypoint secret`: what proves that a process belongs to a job."""

from __future__ import annotations

import os

from rallypoint.cli.command import Argument, command
from rallypoint.errors import RallypointError, UsageError
from rallypoint.store.server.guard.secret import FILE_VARIABLE, SECRET_VARIABLE, job_secret, make_secret


@command(
    Argument(
        "--look",
        action="store_true",
        help="The token of this process's secret: in RALLYPOINT_TOKEN, it is enough for `status` and `web`.",
    ),
    Argument(
        "--output",
        metavar="FILE",
        help="Write it to a new file that only you may read, not to standard output.",
    ),
)
def secret(look: bool, output: str | None) -> None:
    """Make a secret for a job, or a token of it that may only look.

    Give it to every machine of the job, in a file of yours that RALLYPOINT_SECRET_FILE names. From then on
    everything between the machines is TLS, and nobody comes in who has not the same secret.
    """
    text = _token() if look else make_secret()
    if output is None:
        print(text)
        return
    try:
        with os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text + "\n")
    except OSError as error:
        raise RallypointError(
            f"cannot write {output}: {error.strerror}",
            hint="an older secret is not written over: remove it first"
            if isinstance(error, FileExistsError)
            else "",
        ) from error


def _token() -> str:
    found = job_secret()
    if found is None:
        raise UsageError(
            "there is no secret to make a token of",
            hint=f"name its file in {FILE_VARIABLE}, or give the secret in {SECRET_VARIABLE}",
        )
    return found.token
