"""torchrun's rendezvous backend `rallypoint`; torch finds it by the entry-point group `torchrun.handlers`.

    torchrun --rdzv-backend=rallypoint --rdzv-endpoint=HOST:PORT --rdzv-conf=NAME=VALUE,… script.py
    torchrun --rdzv-backend=rallypoint --rdzv-endpoint=HOST,HOST,HOST:PORT script.py

The machine that the endpoint names holds the meeting place, a store server. Each round gets a store server
of its own, which is its workers' MASTER_ADDR and MASTER_PORT. With several machines, each has a relay for it,
to which its workers connect. A job of one machine needs no meeting place: its store is at the endpoint.
An endpoint of several hosts is a store that outlives its machine: see `launch.rendezvous.servers`.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from rallypoint.client.tcp import TCPStore
from rallypoint.errors import (
    ConnectError,
    ConnectionLostError,
    JoinTimeoutError,
    MeetingClosedError,
    RallypointError,
    UsageError,
)
from rallypoint.launch import reports
from rallypoint.launch.blame import read_summary, to_ending
from rallypoint.launch.endpoint import Endpoint, RoundStore, parse_endpoints, parse_round_store
from rallypoint.launch.environment import inject, name_interfaces, name_relay
from rallypoint.launch.health import UnfitError, why_unfit
from rallypoint.launch.options import BACKEND, RendezvousSettings, parse_conf
from rallypoint.launch.rendezvous.attendance import AGENTS, Joining, RollCall, RoundFailures, planned
from rallypoint.launch.rendezvous.digest import Assignment, RoundEnd
from rallypoint.launch.rendezvous.participant import Heartbeat, Participant, Round
from rallypoint.launch.rendezvous.register import DeathNotice
from rallypoint.launch.rendezvous.roster import Ending, Member, Size
from rallypoint.launch.rendezvous.servers import (
    RendezvousPlace,
    open_place,
    openness,
    workers_for,
)
from rallypoint.launch.stacks.watching import RankWatch
from rallypoint.launch.switches import PATCH_VARIABLE, START_VARIABLE, Patch, client_of, patch_of
from rallypoint.pytorch.forking import prepare_next_attempt, prepare_template
from rallypoint.pytorch.parameters import StoreParameters
from rallypoint.pytorch.substitution import find_fault, make_store
from rallypoint.store.connect.connection import who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import is_this_machine
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.server.guard.secret import job_secret, take_secret
from rallypoint.text import LONGEST_SENTENCE, shown

logger = logging.getLogger("rallypoint.torchrun")

_TOLD_SECONDS = 5.0
_LOOKS_PER_SECOND = 1000  # of all machines together, at the meeting place
_LOOK_SECONDS = (0.1, 1.0)  # of one machine, at least and at most
_CLOCK_SECONDS = 10.0  # by which clocks may differ
_PAUSE_SECONDS = 60.0

_Answer = TypeVar("_Answer")


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A handler for torchrun's parameters."""
    try:
        return RallypointHandler(params)
    except RallypointError as error:
        raise _as_torch(error) from error


class RallypointHandler(RendezvousHandler):  # type: ignore[misc]  # torch is not typed here
    """One agent's side of the rendezvous; see torch's `RendezvousHandler` for what each method is for."""

    def __init__(self, params: RendezvousParameters) -> None:
        take_secret()
        conf = parse_conf(params.config)
        if conf.start:
            os.environ[START_VARIABLE] = conf.start
        prepare_template()  # before there are threads
        size = Size(params.min_nodes, params.max_nodes)
        self._run_id = params.run_id
        has_relays = conf.relay != "off" and patch_of() is not Patch.NEVER
        launchers = size.most + conf.spares
        endpoints = parse_endpoints(params.endpoint)
        self._place = open_place(
            endpoints,
            launchers,
            params.run_id,
            hosts=conf.is_host,
            local_address=params.local_addr,
            seconds=conf.join_timeout,
            ports=conf.port_range,
            has_relays=has_relays,
        )
        self._route = RankRoute(self._place, conf, has_relays=has_relays, is_shared=launchers > 1)
        # The name that ranks and relays use for this machine, so that it has one name: not its local_addr.
        who = who_am_i(Role.AGENT)
        member = Member(secrets.token_hex(8), who.host, who.pid, conf.rank, self._place.is_here)
        self._conf = conf
        self._meeting = Participant(
            self._place.store,
            params.run_id,
            member,
            size,
            conf.outlasting(self._place.pause_seconds),
            settings=conf.shared(size, has_relays=has_relays),
            endpoint=str(endpoints),
            find_jobs=self._place.find_jobs,
            on_end=self._announce_restart,
        )
        self.restarts_left: int | None = None
        """How often torchrun may start the ranks again that fail here; None: not known. To be set."""
        self._clock_ahead = 0.0
        self._joining = Joining()
        self._failures = RoundFailures(self._place)
        self._has_taken_part = False
        self._is_well = False  # its ranks ran until another machine was lost, or came
        self._is_bystander = False  # nothing of this machine's says anything about the job
        self._check_seconds = _LOOK_SECONDS[1]
        atexit.register(self._give_up)
        if launchers > 1:
            self._leave_death_notice()
        self._heart = Heartbeat(self._meeting) if launchers > 1 else None
        self._next_check = Deadline(0.0)
        self._pause = Deadline(0.0)
        self._agent_store: Any = None
        self._has_launcher = reports.folder_of(os.environ) is not None
        # Who wants torch as it is gets nothing into the ranks that `rallypoint run` has not put there.
        self._watch = RankWatch(
            lambda lines: logger.warning("rallypoint: %s", "\n".join(lines)),
            is_wanted=self._has_launcher or patch_of() is not Patch.NEVER,
        )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return str(self._run_id)

    def next_rendezvous(self) -> RendezvousInfo:
        self._end_attempt()
        ending = self._first_failure()
        self._failures.forget()  # the launcher's last words are about the last round
        self._place.end_relay()  # before the store that it asks is ended, which it would report
        self._route.prepare()
        try:
            if self._place.is_replicated and not self._has_taken_part:
                self._meeting.open_again()
            if not self._is_well:  # who waits for a spare is not kept waiting for what its ranks have shown
                self._examine()
            self._is_well = False
            return self._enter(self._meeting.next_round(self._route.start_store, ending))
        except MeetingClosedError as error:
            if not self._conf.spares or self._has_taken_part:
                raise _as_torch(error) from error
            logger.warning("rallypoint: the job has ended, and this spare machine was not needed")
            raise SystemExit(0) from None
        except RallypointError as error:
            self._is_bystander = isinstance(error, UsageError | UnfitError)
            raise _as_torch(self._place.named(error)) from error
        except dist.DistNetworkError as error:
            raise RendezvousConnectionError(
                f"the round's store cannot be reached: {error}\nhint: ranks without a relay need a port of "
                "their own on the machine that keeps it (--port-range); does a firewall stand in between?"
            ) from error

    def is_closed(self) -> bool:
        return self._ask(lambda: self._meeting.is_closed, False)

    def set_closed(self) -> None:
        self._ask(lambda: self._meeting.close("its launcher has closed it"), None)

    def num_nodes_waiting(self) -> int:
        """Not 0 if the workers are to start again: a machine may come in, or one is lost.

        The agent asks ten times a second; with thousands of machines, once is enough for the store. With few,
        a spare is in the next round sooner.
        """
        self._failures.log_lost()
        if self._place.has_stranded_rank():
            return self._start_again_without_store()
        self._joining.announce()
        if self.restarts_left != 0:
            prepare_next_attempt()
            self._route.prepare()
        if self._next_check.passed:
            self._next_check = Deadline(self._check_seconds)
            self._is_well = self._ask(self._meeting.wants_restart, False)
            return int(self._is_well)
        return 0

    def _start_again_without_store(self) -> int:
        """The workers start again, with a new store: one of them could not start without it."""
        self._place.close_orphaned()
        if self.restarts_left == 0:
            raise RendezvousConnectionError(
                "a rank cannot connect to the job's store, which has ended, and the job may not start again"
                "\nhint: --max-restarts=1 lets it start again with a new store"
            )
        logger.warning("rallypoint: a rank cannot connect to the job's store, which has ended")
        return 1

    def shutdown(self) -> bool:
        """Leave. The machine with the stores stays until the others have left."""
        self._end_attempt()
        if self._heart is not None:
            self._heart.stop()  # before it leaves: the machine with the store may end it then
        first = self._first_failure()
        if first is not None and first.follows:
            self._failures.look_for_store()
            first = self._first_failure()
        self._failures.report()
        atexit.unregister(self._give_up)
        if self._is_bystander:
            self._ask(self._meeting.give_up, None)
        else:
            self._ask(lambda: self._meeting.leave(first, "the job has ended"), None)
            if first is not None:
                of_all = self._ask(lambda: self._meeting.first_failure(_TOLD_SECONDS), None) or first
                reports.FIRST.leave(read_summary(of_all.detail or of_all.text))
        alone = self._ask(self._meeting.await_others_gone, True) if self._place.holds_a_server else True
        self._agent_store = None
        self._place.close(alone=alone)
        self._watch.close()
        return True

    def _end_attempt(self) -> None:
        """Neither count nor watch the ranks any more."""
        self._failures.log_lost()
        self._place.close_orphaned()
        self._joining.stop(without_store=self._failures.has_lost_server)
        self._watch.stop()

    def _give_up(self) -> None:
        """This process ends without a `shutdown`: it was told to go by a signal."""
        self._joining.stop()
        self._ask(self._meeting.give_up, None)

    def _leave_death_notice(self) -> None:
        """Let the launcher say that this process is gone, if it is killed."""
        folder, store = reports.folder_of(os.environ), self._place.store
        if folder is not None and isinstance(store, TCPStore):
            meeting = self._meeting
            DeathNotice(store.host, store.port, meeting.prefix, meeting.member, meeting.size).leave_to(folder)

    def _examine(self) -> None:
        """UnfitError if this machine is not fit to take part, once the job has no need of it any more."""
        reason = why_unfit(self._conf.examination)
        if reason:
            logger.error("rallypoint: this machine is not fit, and stays out of the job: %s", reason)
            if self._heart is not None:
                self._meeting.stay_out(reason)
            raise UnfitError(self._conf.examination, reason)

    def _enter(self, met: Round) -> RendezvousInfo:
        reports.begin_attempt(met.number)
        self._joining.begin(met.number)
        is_first, self._has_taken_part, self._clock_ahead = not self._has_taken_part, True, met.clock_ahead
        least, most = _LOOK_SECONDS
        self._check_seconds = min(most, max(least, met.size / _LOOKS_PER_SECOND))
        if self._conf.examination != "off" and abs(met.clock_ahead) > _CLOCK_SECONDS:
            logger.warning(
                "rallypoint: this machine's clock is %.0f s ahead of that of the machine with the store",
                met.clock_ahead,
            )
        round_store = parse_round_store(met.store)
        store_place, view = round_store.master, self._place.view_of(round_store)
        relay = self._route.open(round_store, met)
        self._failures.enter(round_store, relay if relay is None or round_store.name else store_place)
        place = relay or store_place
        patience = timedelta(seconds=self._meeting.conf.join_timeout)
        wanted = StoreParameters(*place, timeout=patience, use_libuv=False)
        store = make_store(wanted, client_of(), Patch.AUTO, Role.AGENT)
        self._agent_store = store  # C++ keeps no Python object alive
        if met.rank == 0:  # one machine is enough to warn, and for the roll call
            if is_first and met.size > 1 and (warning := openness(view.address)):
                logger.warning("rallypoint: %s", warning)
            if met.size > 1:
                reports.ROLL.leave(reports.JoinProgress(0, 0))  # the ranks of this machine are not all
            way = place if view.name else store_place
            prepare = planned(view, met.number, self._meeting.members_of(met))
            self._joining.call_roll(RollCall(way, view, prepare, self._has_launcher))
        self._watch.start(place, view)
        if self._conf.spares:
            self._route.prepare()  # a round with a spare is to begin at once
        return RendezvousInfo(
            dist.PrefixStore(AGENTS, store),
            met.rank,
            met.size,
            RendezvousStoreInfo(*store_place),
        )

    def _first_failure(self) -> Ending | None:
        """What failed first on this machine in the attempt that has just ended."""
        first = self._failures.first()
        return to_ending(first, self._clock_ahead) if first is not None else None

    def _announce_restart(self, number: int, end: RoundEnd) -> None:
        """Log how an attempt has ended, and what follows. Machine changes do not count as restarts."""
        size, conf, left = self._meeting.size, self._meeting.conf, self.restarts_left
        without = "a machine has joined" if end.newcomers else "no machine has reported a failure"
        why = shown(end.first.text, LONGEST_SENTENCE) if end.first else without
        outlook = f"; {end.outlook(size, conf.join_timeout, conf.last_call_timeout)}" if size.most > 1 else ""
        most = f" of at most {number + 2 + left}" if left is not None else ""
        logger.warning(
            "rallypoint: attempt %d has ended: %s%s; attempt %d%s follows",
            *(number + 1, why, outlook, number + 2, most),
        )

    def _ask(self, question: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        """An answer from the meeting place; `otherwise` if it is gone: ranks that run need not end for that.

        A question without an answer takes its time, so there is a pause before the next one.
        """
        if not self._pause.passed:
            return otherwise
        try:
            return question()
        except RallypointError as error:
            logger.warning("the meeting place does not answer: %s", error.message)
            self._pause = Deadline(_PAUSE_SECONDS)
            return otherwise


class RankRoute:
    """How the ranks of this machine reach each round's store: directly, or through a relay of their machine.

    torchrun's agent starts the relay, and says in its environment, which ranks inherit, where it is.
    """

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


_ERRORS: tuple[tuple[type[RallypointError], Any], ...] = (
    (MeetingClosedError, RendezvousClosedError),
    (JoinTimeoutError, RendezvousTimeoutError),
    (ConnectError, RendezvousConnectionError),
    (ConnectionLostError, RendezvousConnectionError),
)


def _as_torch(error: RallypointError) -> Exception:
    """What torch's agent expects; UsageError becomes the ValueError that it is."""
    if isinstance(error, UsageError):
        return ValueError(str(error))
    kind = next((theirs for ours, theirs in _ERRORS if isinstance(error, ours)), RendezvousError)
    translated: Exception = kind(str(error))
    return translated
