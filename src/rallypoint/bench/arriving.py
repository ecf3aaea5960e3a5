"""New clients: beside others that are busy, and very many at the same moment."""

from __future__ import annotations

import time
from base64 import b64encode
from contextlib import closing
from dataclasses import replace
from typing import Final

from rallypoint.bench.crowd import Crowd
from rallypoint.bench.load import Load, sample
from rallypoint.bench.machine import dropped_connects
from rallypoint.bench.operations import KEY, VALUE
from rallypoint.bench.results import Sample
from rallypoint.bench.session import Session
from rallypoint.bench.sockets import ANSWER_LIMIT_S, connect, converse
from rallypoint.bench.workers import Message, Worker, gather, start

BUSY_CLIENTS: Final = 500
BUSY_PIPELINED: Final = 4
NEW_CLIENTS: Final = 1_000
STORM_PROCESSES: Final = 2
STORM_CLIENTS: Final = 15_000
"""Two processes of 7,500: a process may often open 20,000 files, and one address has about 28,000 ports."""


class Accepts(Session):
    """New clients that arrive while others are busy."""

    per_request = 1

    def open(self) -> None:
        dialect = self.target.dialect
        with connect(self.target.port, dialect) as client:
            converse(client, dialect.store(KEY, VALUE))
        self.busy = start(self.resources, lambda: Worker("rallypoint.bench.busy", "busy clients"))
        place: Message = {"port": self.target.port, "dialect": dialect.name}
        self.busy.ask(ANSWER_LIMIT_S, do="connect", count=BUSY_CLIENTS, **place)
        exchange = dialect.get(KEY, VALUE).times(self.per_request)
        texts = {"request": exchange.request, "reply": exchange.reply}
        self.order: Message = {name: b64encode(text).decode() for name, text in texts.items()}
        self.measure(NEW_CLIENTS // 10)

    def round(self) -> Sample:
        return self.measure(NEW_CLIENTS)

    def measure(self, count: int) -> Sample:
        """Let that many new clients arrive, and leave again."""
        files = self.target.open_files()
        with closing(Crowd(self.target.port, self.target.dialect, count)) as crowd:
            crowd.gather()
            self.busy.order(do="run", per_request=self.per_request, **self.order)
            time.sleep(0.2)  # all of the busy clients are in full swing by then
            load, cpu = self.metered(crowd.arrive)
            busy = Load(**self.busy.ask(ANSWER_LIMIT_S, do="stop"))
        self.target.await_open_files(files)
        result = sample(load.seconds, [load], cpu)
        return replace(result, load_share=max(load.share, busy.share))


class AcceptsBesidePipelining(Accepts):
    """The same, beside clients with some requests in flight each.

    On a machine of two cores the new clients take time from the process of the busy ones. If each of those
    has but one request in flight, the server may then be idle for a moment, and accept at its leisure: torch
    takes anything from 0.05 to 2 seconds. With a few requests each, the server stays busy throughout.
    """

    per_request = BUSY_PIPELINED


class Storm(Session):
    """Very many clients that connect at the same moment.

    More than the backlog holds: the kernel drops the rest, and they try again after 1, 2, 3 and more seconds.
    So the time comes in whole seconds, and differs much from round to round.
    """

    def open(self) -> None:
        self.warm_up()
        make = lambda: Worker("rallypoint.bench.crowd", "a crowd")  # noqa: E731 - said once, used twice
        self.crowds = [start(self.resources, make) for _ in range(STORM_PROCESSES)]

    def round(self) -> Sample:
        target = self.target
        files, resident = target.open_files(), target.resident_bytes()
        count = STORM_CLIENTS // STORM_PROCESSES
        self.everyone(do="gather", port=target.port, dialect=target.dialect.name, count=count)
        dropped = dropped_connects()
        answers, cpu = self.metered(lambda: self.everyone(do="arrive"))
        loads = [Load(**answer["load"]) for answer in answers]
        dropped = dropped_connects() - dropped
        memory = (target.resident_bytes() - resident) / STORM_CLIENTS
        self.everyone(do="leave")
        target.await_open_files(files)
        seconds = max(load.end for load in loads) - min(load.start for load in loads)
        extras = {"dropped": dropped, "turned_away": sum(answer["turned_away"] for answer in answers)}
        return replace(sample(seconds, loads, cpu), memory=memory, extras=extras)

    def warm_up(self) -> None:
        files = self.target.open_files()
        with closing(Crowd(self.target.port, self.target.dialect, NEW_CLIENTS)) as crowd:
            crowd.gather()
            crowd.arrive()
        self.target.await_open_files(files)

    def everyone(self, **order: object) -> list[Message]:
        """Say a word to all processes; return their answers."""
        for crowd in self.crowds:
            crowd.order(**order)
        return gather(self.crowds, ANSWER_LIMIT_S)
