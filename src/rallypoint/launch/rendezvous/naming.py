"""Whether an endpoint is this machine, where its name may not be known yet, or still be another's.

In Kubernetes a pod is up some seconds before its name is in the cluster's DNS; and the name of a pod that was
replaced leads to the old address for a while. So one look says too little: as long as nothing answers at the
endpoint, it is asked again whose it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.rendezvous.waiting import Waiting, connecting_state
from rallypoint.store.connect.connecting import Attempts, connect
from rallypoint.store.connect.connection import who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import is_this_machine
from rallypoint.store.rollcall.identity import Role


def await_host(endpoint: Endpoint, deadline: Deadline, hosts: bool | None = None) -> bool:
    """Whether this machine holds the endpoint, as soon as that is certain; `hosts`: what the user says.

    It does not when something answers there. ConnectError when neither is so by the deadline.
    """
    if hosts or (hosts is None and is_this_machine(endpoint.host)):
        return True

    def check(addresses: Sequence[str]) -> None:
        if hosts is None and any(map(is_this_machine, addresses)):
            raise _IsHere

    attempts = Attempts(*endpoint)
    try:
        with Waiting(lambda: connecting_state([attempts], deadline.remaining)):
            connect(*endpoint, deadline, who_am_i(Role.AGENT), attempts=attempts, after_try=check).close()
    except _IsHere:
        return True
    return False


class _IsHere(Exception):  # noqa: N818 - it ends the tries, and is no error
    """The name has turned out to be this machine's."""
