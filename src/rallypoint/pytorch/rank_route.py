"""How the ranks of this machine reach a round's store: directly, or through a relay of their machine.

torchrun's agent starts the relay, and says in its environment, which ranks inherit, where it is.
"""

from __future__ import annotations

import logging
import os

from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import Endpoint, RoundStore
from rallypoint.launch.environment import inject, name_interfaces, name_relay
from rallypoint.launch.options import RendezvousSettings
from rallypoint.launch.rendezvous.digest import Assignment
from rallypoint.launch.rendezvous.participant import Round
from rallypoint.launch.rendezvous.servers import RendezvousPlace, workers_for
from rallypoint.launch.switches import PATCH_VARIABLE, Patch, patch_of
from rallypoint.pytorch.substitution import find_fault
from rallypoint.store.machine.addresses import is_this_machine
from rallypoint.store.server.guard.secret import job_secret

logger = logging.getLogger("rallypoint.torchrun")


class RankRoute:
    """The way of one machine's ranks, in all rounds."""

    def __init__(
        self, place: RendezvousPlace, conf: RendezvousSettings, *, has_relays: bool, is_shared: bool
    ) -> None:
        """`has_relays`: machines may have relays. `is_shared`: the job has several machines."""
        self._place = place
        self._conf = conf
        self._has_relays = has_relays
        self._prepares = (has_relays or not is_shared) and not conf.workers

    def prepare(self) -> None:
        """Start the process of the next round's relay or store, if it needs one."""
        if self._prepares:
            self._place.prepare_next()

    def start_store(self, assignment: Assignment) -> str:
        """Start the round's store, as its keeper; where it is."""
        workers = self._conf.workers
        if workers is None:
            workers = workers_for(assignment.size, have_relays=self._has_relays)
        return str(self._place.start_round(assignment.name, workers, has_relays=self._has_relays))

    def open(self, store: RoundStore, met: Round) -> Endpoint | None:
        """Lead the ranks to the store of a round; the relay, if they have one."""
        relay = self._place.start_relay(store) if self._wants_relay(met) else None
        if relay is None and job_secret() is not None and not is_this_machine(store.master.host):
            raise UsageError(
                f"the workers of this machine need a relay to reach {store.master}, as this job has a secret",
                hint=f"leave out --relay=off and {PATCH_VARIABLE}=never: they are for jobs without a secret",
            )
        name_relay(os.environ, relay, store.master)
        if met.size > 1 and (named := name_interfaces(os.environ, self._place.own_address())):
            logger.warning("rallypoint: %s", named)
        fault = find_fault(*(relay or store.master))
        if patch_of() is not Patch.NEVER and (fault is not None or relay is not None):
            if fault is not None:
                logger.info(
                    "this torch's TCPStore is no good (%s): the workers get Rallypoint's help", fault.name
                )
            os.environ.update(inject(os.environ))
        return relay

    def _wants_relay(self, met: Round) -> bool:
        if patch_of() is Patch.NEVER:  # the workers' torch would not find the relay
            if self._conf.relay == "on":
                logger.warning("no relay: %s=never keeps the workers from one", PATCH_VARIABLE)
            return False
        return self._conf.relay == "on" or (self._conf.relay == "auto" and met.size > 1)
