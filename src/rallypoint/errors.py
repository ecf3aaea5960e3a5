"""Every error that Rallypoint raises, under one base class.

An error says what happened and to whom in its first line and what to do in its `hint`. All of them are
`RuntimeError`s, as torch's own store errors are, so that code written for torch's stores catches them;
those that are time-outs or network failures are also `TimeoutError` or `ConnectionError`.
"""

from __future__ import annotations


class RallypointError(RuntimeError):
    """Base of all errors of this package. `hint` is one sentence that says what to do, or empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(RallypointError, ValueError):
    """An argument, a URL, a variable or a limit that cannot be meant that way."""


class StoreTimeoutError(RallypointError, TimeoutError):
    """A deadline passed. `keys` are the ones that were still missing, where keys were awaited.

    `missing` are the ranks that had not come, where that is known.
    """

    def __init__(
        self, message: str, *, hint: str = "", keys: tuple[str, ...] = (), missing: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.keys = keys
        self.missing = missing


class QueueEmptyError(RallypointError):
    """A pop that was told not to wait found nothing in the queue."""


class ConnectError(RallypointError, ConnectionError):
    """No store server could be reached. The message lists each address that was tried.

    `is_silent`: somebody accepts connections there, but has not answered.
    """

    def __init__(self, message: str, *, hint: str = "", is_silent: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.is_silent = is_silent


class ConnectionLostError(RallypointError, ConnectionError):
    """The connection ended in the middle of an operation, which may or may not have been carried out."""


class PortInUseError(RallypointError, ConnectionError):
    """The port is taken. `holder` describes the process that holds it, where the system tells."""

    def __init__(self, message: str, *, hint: str = "", holder: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.holder = holder


class BindError(RallypointError, ConnectionError):
    """The server's address could not be bound, for another reason than a port in use."""


class ServerStartError(RallypointError):
    """The server process ended, or said nothing, before it was ready."""


class NotOursError(RallypointError):
    """The server is a store, but not one of Rallypoint's: it cannot be asked what only those know."""


class JoinTimeoutError(StoreTimeoutError):
    """Not enough machines came to a job's meeting in time. The message names who did, and who is missing."""


class MeetingClosedError(RallypointError):
    """A job's meeting is over; nobody may join it any more."""


class StaleFileError(RallypointError):
    """A file store's file belongs to another run, finished or not."""


class ProtocolError(RallypointError):
    """The peer broke the wire protocol; its connection cannot be used any more.

    `replies` are the answers to its requests before the violation, which it is still to be sent.
    """

    replies: bytes = b""


class LimitError(ProtocolError):
    """The peer went over one of the limits of `rallypoint.store.wire.limits`."""


class UnknownOperationError(ProtocolError):
    """The peer asked for an operation that this version does not know."""


class SessionLostError(ProtocolError):
    """The other side does not know a relay's session any more: what was under way has no answer."""


class AccessError(ProtocolError):
    """The peer did not prove that it belongs to the job, is another user's, or refused this process."""
