"""Whether an endpoint is this machine, where its name may not be known yet, or still be another's.

In Kubernetes a pod is up some seconds before its name is in the cluster's DNS; and the name of a pod that was
replaced leads to the old address for a while. So one look says too little: as long as nothing answers at the
endpoint, it is asked again whose it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from rallypoint.launch.endpoint import Endpoint
from rallypoint.rollcall.identity import Role
from rallypoint.server.process.binding import is_this_machine
from rallypoint.stores.client.connecting import connect, is_numeric
from rallypoint.stores.client.deadline import Deadline
from rallypoint.stores.client.hello import who_am_i

logger = logging.getLogger("rallypoint.meeting")

_FIRST_WORD = 1.0  # seconds: a name that comes sooner is no news
_NEXT_WORD = 30.0  # then twice as long each time


def await_host(endpoint: Endpoint, deadline: Deadline) -> bool:
    """Whether the endpoint is this machine, as soon as that is certain.

    It is not when something answers there. ConnectError when neither is so by the deadline.
    """
    if is_this_machine(endpoint.host):
        return True
    if is_numeric(endpoint.host):
        return False
    name = NameWatch(endpoint.host)
    try:
        connect(*endpoint, deadline, who_am_i(Role.AGENT), after_try=name.look).close()
    except _IsHere:
        return True
    name.found()
    return False


class _IsHere(Exception):  # noqa: N818 - it ends the tries, and is no error
    """The name has turned out to be this machine's."""


class NameWatch:
    """Says that a name is not known yet: soon, then seldom; and when it is, if that was said."""

    def __init__(
        self,
        host: str,
        tell: Callable[[str], object] = logger.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._tell = tell
        self._clock = clock
        self._began = clock()
        self._next_word = _FIRST_WORD

    def look(self, addresses: Sequence[str]) -> None:
        """See what the name leads to now, if to anything; raises if that is this machine."""
        if addresses:
            self.found()
        elif (seconds := self._clock() - self._began) >= self._next_word:
            self._tell(
                f"rallypoint: the name {self._host} does not resolve yet: waiting ({seconds:.0f} s so far)"
            )
            while self._next_word <= seconds:
                self._next_word = max(2 * self._next_word, _NEXT_WORD)
        if any(map(is_this_machine, addresses)):
            raise _IsHere

    def found(self) -> None:
        """The name is known."""
        if self._next_word > _FIRST_WORD:
            self._tell(
                f"rallypoint: the name {self._host} resolves now, after {self._clock() - self._began:.0f} s"
            )
            self._next_word = _FIRST_WORD
