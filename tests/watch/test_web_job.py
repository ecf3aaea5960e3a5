"""A job in which a rank is held back: the page, `rallypoint status` and /metrics tell the same of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest
from playwright.sync_api import Browser, expect

from command_line import invoke
from rallypoint.store.connect.connecting import connect
from rallypoint.store.connect.connection import Connection
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Identity, Role
from rallypoint.store.wire.encoding import counted_request, request
from rallypoint.store.wire.opcodes import Op
from raw import until
from web_browser import Look, browsing, looking

SECONDS = 180.0
KEY = b"/0//cpu//0/3"
"""Which rank 3 writes, and for which all others wait, as with gloo."""


@dataclass
class Job:
    """A server with its page, and the ranks that have come so far, which are only connections."""

    store: str
    url: str
    stack: ExitStack
    _ranks: dict[int, Connection] = field(default_factory=dict)

    def start(self, *ranks: int) -> None:
        host, _, port = self.store.rpartition(":")
        for rank in ranks:
            who = Identity("node-a", 1000 + rank, rank, rank, 4, Role.RANK)
            connection = connect(host, int(port), Deadline(SECONDS), who)
            self._ranks[rank] = self.stack.enter_context(closing(connection))
            message = request(Op.SET, KEY, b"") if rank == 3 else counted_request(Op.WAIT, [KEY])
            connection.send(message, Deadline(SECONDS))

    def await_key(self) -> None:
        """Until those who wait have the key."""
        for rank in range(3):
            assert self._ranks[rank].read(1, Deadline(SECONDS)) == b"\0"

    def leave(self, rank: int) -> None:
        self._ranks[rank].close()


@contextmanager
def running_job(log: IO[str]) -> Iterator[Job]:
    """A server with its page, and no rank yet; all of it is ended when the block is left."""
    place = ["--host", "127.0.0.1", "--port", "0", "--web", "0"]
    command = [sys.executable, "-m", "rallypoint", "serve", *place]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        store = process.stdout.readline().split()[-2]
        until(lambda: "http://" in Path(log.name).read_text(), "the server says where its page is")
        (url,) = re.findall(r"http://\S+", Path(log.name).read_text())
        with ExitStack() as stack:
            yield Job(store, url, stack)
    finally:
        process.terminate()  # not killed at once: it has a page to end
        process.communicate(timeout=SECONDS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


Told = dict[str, Any]
"""How many ranks are expected, joined, missing and waiting, which are missing, and what is waited for."""


def status(store: str) -> Told:
    """What `rallypoint status` tells of a store."""
    return told_by(json.loads(invoke("status", store, "--json").stdout)["roll"])


def told_by(roll: dict[str, Any]) -> Told:
    states = [each["state"] for each in roll["ranks"]]
    return {
        "expected": roll["expected"],
        "joined": roll["joined"],
        "late": states.count("late"),
        "gone": states.count("gone"),
        "waiting": states.count("waiting"),
        "missing": roll["missing"],
        "keys": [each["key"] for each in roll["awaited"]],
    }


def metrics_of(job: Job) -> Told:
    with urllib.request.urlopen(f"{job.url}metrics", timeout=SECONDS) as response:
        text = response.read().decode()

    def value(name: str) -> int:
        (found,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return int(float(found))

    states = {state: value(f'rallypoint_ranks{{state="{state}"}}') for state in ("late", "gone", "waiting")}
    missing = re.findall(r'^rallypoint_missing_rank\{.*rank="(\d+)"', text, re.MULTILINE)
    assert value("rallypoint_ranks_missing") == states["late"] + states["gone"] == len(missing)
    return {
        "expected": value("rallypoint_ranks_expected"),
        "joined": value("rallypoint_ranks_joined"),
        **states,
        "missing": sorted(map(int, missing)),
        "keys": value("rallypoint_awaited_keys"),
    }


# All at once: between two questions, the page may change.
_READ = """() => {
    const text = (id) => document.getElementById(id).textContent;
    const keys = document.querySelectorAll("#waits-list .key");
    return {
        headline: text("headline"),
        missing: text("missing-text"),
        counts: ["joined", "late", "gone", "waiting"].map((name) => [name, Number(text(`count-${name}`))]),
        keys: [...keys].map((key) => key.textContent),
    };
}"""


def page_of(look: Look) -> Told:
    read = look.page.evaluate(_READ)
    counts = dict(read["counts"])
    said = re.fullmatch(r"(?:All|(\d+) of) (\d+) ranks joined", read["headline"])
    assert said is not None
    assert int(said[1] or said[2]) == counts["joined"]
    missing = re.findall(r"\b\d+\b", re.sub(r" on \S+", "", read["missing"]))
    return {
        "expected": int(said[2]),
        **counts,
        "missing": sorted(map(int, missing)),
        "keys": read["keys"],
    }


def test_page_status_and_metrics_agree(browser: Browser, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log, running_job(log) as job:

        def assert_agreed(told: Told) -> None:
            """No rank moves any more: what each of them tells has to be this.

            But who asks is a new client each time. Until it has said so, it may be the rank that is missing.
            """
            until(lambda: page_of(look) == told, f"the page tells {told}", SECONDS)
            until(lambda: status(job.store) == told, f"status tells {told}", SECONDS)
            counts = {**told, "keys": len(told["keys"])}
            until(lambda: metrics_of(job) == counts, f"the metrics tell {counts}", SECONDS)

        job.start(0, 1, 2)
        with looking(browser, job.url) as look:
            look.await_up()
            expect(look.page.locator("#headline")).to_have_text("3 of 4 ranks joined", timeout=SECONDS * 1000)
            expect(look.page.locator("#waits-list > li")).to_have_count(1)
            held_back = {"expected": 4, "joined": 3, "late": 1, "gone": 0, "waiting": 3}
            assert_agreed({**held_back, "missing": [3], "keys": ["0//cpu//0/3"]})
            assert "rank 3 (late) should have written it" in look.text("#waits-list")
            assert look.text("#waits-list .who") == "ranks 0\N{EN DASH}2"

            job.start(3)
            job.await_key()
            complete = {"expected": 4, "joined": 4, "late": 0, "gone": 0, "waiting": 0}
            assert_agreed({**complete, "missing": [], "keys": []})

            job.leave(2)
            one_less = {"expected": 4, "joined": 3, "late": 0, "gone": 1, "waiting": 0}
            assert_agreed({**one_less, "missing": [2], "keys": []})
