"""Doctors of several machines: exchange, gatherings over a real store, visits, and what launchers say."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace

import pytest

from rallypoint.client.base import PrefixStore
from rallypoint.client.tcp import TCPStore
from rallypoint.codec import from_text, to_text
from rallypoint.diagnose.doctor import exchange, network, probes, situation
from rallypoint.diagnose.doctor.between_machines import judge_machines
from rallypoint.diagnose.doctor.exchange import (
    Gathered,
    Launched,
    Participant,
    by_launcher,
    gather,
    receive,
    visit,
)
from rallypoint.diagnose.doctor.probes import Card, Way, own_card, probe_server, reach
from rallypoint.diagnose.findings import Finding, State
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.endpoint import Endpoint
from rallypoint.store.machine.interfaces import Interface
from raw import SECONDS
from threads import serving_in_a_thread

OK, W, F = State.OK, State.WARNING, State.FAILURE
HERE = "127.0.0.1"


def card(number: int, port: int, *addresses: str, host: str = HERE) -> Card:
    return Card(number, host, addresses or (HERE,), port, HERE, {"torch": "2"})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_PROBE_SECONDS", 0.2)


@pytest.fixture
def one_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """An server that listens at one socket of one address."""
    monkeypatch.setattr(probes, "_listen", lambda: socket.create_server((HERE, 0)))


@contextmanager
def talking(*replies: bytes | None) -> Iterator[int]:
    """A listener that says something to each caller in turn, and ends the connection; None is nothing."""
    with socket.create_server((HERE, 0)) as listener:
        listener.settimeout(SECONDS)

        def serve() -> None:
            for words in replies:
                caller, _ = listener.accept()
                with caller:
                    caller.settimeout(SECONDS)
                    try:
                        if words is not None:
                            caller.sendall(words)
                            caller.shutdown(socket.SHUT_WR)
                        while caller.recv(100):
                            pass
                    except OSError:  # it has heard enough
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(SECONDS)
        assert not thread.is_alive()


# Probes ----------------------------------------------------------------------------------------------------


STRANGER = "another machine, or another program, answers there"


def test_what_is_no_probe_server_is_an_error_and_no_more() -> None:
    mark = {"mark": "rallypoint doctor", "number": 0}
    ended = "the connection was ended before a word was said"
    for words, error in (
        (b"", ended),
        (b"SSH-2.0", ended),
        (b"HTTP/1.0 400\r\n", STRANGER),
        (b"{}\n", STRANGER),
        (json.dumps({**mark, "number": 5, "you": HERE, "time": 1.0}).encode() + b"\n", STRANGER),
        (b"\xff\xfe\n", ""),
        (b"x" * 5000, ""),
        (b"[" * 4000 + b"\n", ""),
        (json.dumps(mark).encode() + b"\n", ""),
        (json.dumps({**mark, "you": "x", "time": "soon"}).encode() + b"\n", ""),
    ):
        with talking(words) as port:
            way = reach(1, card(0, port))
        assert way.error.startswith(f"{HERE}: {error}"), words
        assert (way.round_trip, way.seen_as) == (0.0, "")
        assert len(way.error) > len(HERE) + 2


def test_a_listener_that_says_nothing(impatient: None) -> None:
    with talking(None) as port:
        assert reach(1, card(0, port)).error == f"{HERE}: no answer within 0.2 s"


def test_the_next_address_is_tried(one_door: None) -> None:
    with probe_server(0) as server:
        way = reach(1, card(0, server, "127.0.0.2", HERE))
    assert (way.address, way.error) == (HERE, "")


def test_a_probe_server_has_a_limit_of_callers(monkeypatch: pytest.MonkeyPatch, one_door: None) -> None:
    """A caller that finds no place gets no answer, until another one leaves."""
    monkeypatch.setattr(probes, "_MOST_CALLERS", 2)
    monkeypatch.setattr(probes, "_PROBE_SECONDS", SECONDS)
    with probe_server(0) as server, ExitStack() as stack:
        callers = [stack.enter_context(socket.create_connection((HERE, server), SECONDS)) for _ in range(2)]
        for caller in callers:
            assert caller.recv(4096).endswith(b"\n")
        monkeypatch.setattr(probes, "_PROBE_SECONDS", 0.1)
        assert "no answer within" in reach(1, card(0, server)).error
        monkeypatch.setattr(probes, "_PROBE_SECONDS", SECONDS)
        for caller in callers:
            caller.close()
        assert reach(1, card(0, server)).error == ""


def test_silent_callers_do_not_keep_their_places(monkeypatch: pytest.MonkeyPatch, one_door: None) -> None:
    monkeypatch.setattr(probes, "_MOST_CALLERS", 1)
    monkeypatch.setattr(probes, "_PROBE_SECONDS", 0.05)
    with probe_server(0) as server, socket.create_connection((HERE, server), SECONDS) as caller:
        assert caller.recv(4096).endswith(b"\n")
        monkeypatch.setattr(probes, "_PROBE_SECONDS", SECONDS)
        assert reach(1, card(0, server)).error == ""


def test_addresses_that_do_not_answer_are_told_until_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose packets are dropped costs seconds; of eight, not all are waited for."""
    with probe_server(0) as port:
        pass
    closed = card(0, port, HERE, "127.0.0.2")
    way = reach(1, closed)
    assert way.address == HERE
    assert way.error == f"{HERE}: Connection refused; 127.0.0.2: Connection refused"
    monkeypatch.setattr(probes, "_LONGEST_CALL_S", -1.0)
    assert reach(1, closed).error == f"{HERE}: Connection refused"


# Cards -----------------------------------------------------------------------------------------------------


def test_the_card_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [
        Interface("lo", True, (HERE,)),
        Interface("eth7", True, ("10.0.0.7", "fd00::7")),
        Interface("docker0", True, ("172.17.0.1",)),
    ]
    monkeypatch.setattr(network, "interfaces", lambda: there)
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.9")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = own_card(3, "10.0.0.7", 4000)
    assert (found.number, found.host, found.port, found.gloo) == (3, "127.0.0.9", 4000, "127.0.0.9")
    assert found.addresses == ("10.0.0.7", "fd00::7")
    assert found.name == "127.0.0.9 (3)"
    assert own_card(3, "192.168.0.1", 4000).addresses == ("192.168.0.1", "10.0.0.7", "fd00::7")
    assert set(found.versions) >= {"python", "torch", "rallypoint"}
    many = tuple(f"10.0.0.{number}" for number in range(30))
    monkeypatch.setattr(network, "interfaces", lambda: [Interface("eth7", True, many)])
    assert own_card(0, "10.0.0.20", 1).addresses == ("10.0.0.20", *many[:7])

    def refuse() -> list[Interface]:
        raise OSError("no")

    monkeypatch.setattr(network, "interfaces", refuse)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    found = own_card(0, HERE, 1)
    assert (found.addresses, found.gloo) == ((HERE,), "")


def test_the_address_that_gloo_takes_is_that_of_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [
        Interface("lo", True, (HERE,)),
        Interface("eth7", True, ("10.0.0.7",)),
        Interface("eth8", True, ()),
    ]
    monkeypatch.setattr(network, "interfaces", lambda: there)
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.9")
    for name, address in (("eth7", "10.0.0.7"), ("eth8", "127.0.0.9"), ("", "127.0.0.9"), ("lo", HERE)):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        assert own_card(0, HERE, 1).gloo == address


# Gatherings ------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[TCPStore]:
    with serving_in_a_thread(0) as port, TCPStore(HERE, port, timeout=SECONDS) as found:
        yield found


def together(store: TCPStore, places: list[Participant], found: list[list[Finding]]) -> list[Gathered]:
    """What each member of a gathering comes to."""

    def attend(place: Participant, findings: list[Finding]) -> Gathered:
        with store.clone() as own:
            return gather(PrefixStore("room", own), place, findings)

    with ThreadPoolExecutor(len(places)) as pool:
        futures = [pool.submit(attend, *each) for each in zip(places, found, strict=True)]
        return [future.result(SECONDS) for future in futures]


def places(count: int, *numbers: int, seconds: float = SECONDS) -> list[Participant]:
    return [Participant(number, count, HERE, seconds) for number in numbers]


def test_three_machines_know_of_each_other_and_of_all_ways(store: TCPStore) -> None:
    found = [[Finding("a", OK, "0")], [], [Finding("c", W, "2", "do")]]
    first, *others = together(store, places(3, 0, 1, 2), found)
    assert others == [first, first]
    assert (first.missing, first.silent) == ([], [])
    assert [(way.start, way.goal) for way in first.ways] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    for way in first.ways:
        assert (way.address, way.error, way.seen_as) == (HERE, "", HERE)
        assert 0 < way.round_trip < SECONDS
        assert abs(way.clock) < SECONDS
    assert first.findings == {number: tuple(each) for number, each in enumerate(found)}
    assert [each.state for each in judge_machines(first) if each.name in ("machines", "ways")] == [OK] * 2


def test_a_machine_that_comes_and_dies_before_it_says_what_it_reached(
    store: TCPStore, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((HERE, 0)) as closed:
        dead = card(1, closed.getsockname()[1])
    PrefixStore("room", store).set("card/1", json.dumps(asdict(dead)))
    monkeypatch.setattr(exchange, "_FAREWELL_S", SECONDS)
    begun = time.monotonic()
    first, third = together(store, places(3, 0, 2, seconds=0.5), [[], []])
    assert time.monotonic() - begun < SECONDS, "nobody waits for the farewell of the dead"
    assert first == third
    assert (first.missing, first.silent) == ([], [1])
    assert {(way.start, way.goal) for way in first.ways if way.error} == {(0, 1), (2, 1)}
    names = [(each.name, each.state) for each in judge_machines(first)]
    assert names.count(("machines", F)) == 1
    assert names.count(("ways", F)) == 2


def test_ways_are_tried_some_at_a_time_in_threads_that_end_with_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_at_once, threads = threading.Barrier(16), set[threading.Thread]()

    def try_one(start: int, goal: Card) -> Way:
        threads.add(threading.current_thread())
        if goal.number in range(4, 20):  # the first that are tried: 3 begins behind itself
            all_at_once.wait(SECONDS)
        return Way(start, goal.number, HERE)

    monkeypatch.setattr(exchange, "reach", try_one)
    found = exchange._try_all(3, [card(number, 1) for number in range(100) if number != 3])
    assert [way.goal for way in found] == [number for number in range(100) if number != 3]
    assert len(threads) == 16
    assert all(each.daemon for each in threads)


@pytest.mark.parametrize(
    "text", [None, "{", json.dumps(asdict(card(2, 1)))], ids=["none", "half", "of another"]
)
def test_a_machine_without_a_card_that_can_be_read_is_missing(text: str | None, store: TCPStore) -> None:
    if text is not None:
        PrefixStore("room", store).set("card/1", text)
    first, third = together(store, places(3, 0, 2, seconds=0.5), [[], []])
    assert first == third
    assert (first.missing, first.silent) == ([1], [])
    assert [(way.start, way.goal, way.error) for way in first.ways] == [(0, 2, ""), (2, 0, "")]


def test_nobody_speaks_for_another(store: TCPStore) -> None:
    """Nor about one that has not come."""
    room = PrefixStore("room", store)
    said = [Way(1, 0, HERE), Way(0, 1, HERE, "made up"), Way(2, 0, HERE, "made up"), Way(1, 2, HERE)]
    with probe_server(1) as ear:
        room.set("card/1", to_text(card(1, ear)))
        room.set("row/1", to_text(exchange.MachineRow(tuple(said), ())))
        room.set("left/1", b"")
        [found] = together(store, places(3, 0, seconds=0.5), [[]])
    assert [(way.start, way.goal, way.error) for way in found.ways] == [(0, 1, ""), (1, 0, "")]


@pytest.mark.parametrize("text", ["{", '{"count": 1000000000, "cards": [], "ways": [], "findings": {}}'])
def test_an_end_that_cannot_be_read_costs_nobody_the_own_results(text: str, store: TCPStore) -> None:
    room = PrefixStore("room", store)
    with probe_server(0) as server:
        room.set("card/0", json.dumps(asdict(card(0, server))))
        room.set("end", text)
        [found] = together(store, places(2, 1), [[Finding("a", OK, "b")]])
    assert found.count == 2
    assert (found.missing, found.findings) == ([], {1: (Finding("a", OK, "b"),)})
    assert [(way.start, way.goal, way.error) for way in found.ways] == [(1, 0, "")]


def test_without_the_first_each_has_what_it_saw_itself(store: TCPStore) -> None:
    second, third = together(store, places(3, 1, 2, seconds=0.5), [[Finding("a", OK, "b")], []])
    assert second.missing == [0]
    assert [(way.start, way.goal) for way in second.ways] == [(1, 2)]
    assert [(way.start, way.goal) for way in third.ways] == [(2, 1)]
    assert second.findings == {1: (Finding("a", OK, "b"),)}


def test_the_first_stays_until_the_others_have_read_the_end(store: TCPStore) -> None:
    """The store may be its own: it must not leave before them."""
    left = threading.Event()
    room = PrefixStore("room", store)

    def first() -> Gathered:
        with store.clone() as own:
            try:
                return gather(PrefixStore("room", own), Participant(0, 2, HERE, SECONDS), ())
            finally:
                left.set()

    with probe_server(1) as ear, ThreadPoolExecutor(1) as pool:
        room.set("card/1", to_text(card(1, ear)))
        room.set("row/1", to_text(exchange.MachineRow((), ())))
        future = pool.submit(first)
        room.wait(["end"], SECONDS)
        assert not left.wait(0.05)
        room.set("left/1", b"")
        assert left.wait(SECONDS)
        told = from_text(Gathered, room.get("end"))
        assert future.result(SECONDS) == told


# Visits ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Practice:
    """A doctor that listens, in threads of this process."""

    endpoint: Endpoint
    visits: queue.SimpleQueue[Gathered]

    def next_visit(self) -> Gathered:
        return self.visits.get(timeout=SECONDS)


class _EndError(Exception):
    pass


@pytest.fixture
def practice(monkeypatch: pytest.MonkeyPatch) -> Iterator[Practice]:
    """It ends as an interrupt ends it: while it waits for a visitor."""
    monkeypatch.setattr(exchange, "_LOOK_S", 0.02)
    monkeypatch.setattr(exchange, "own_address", lambda: HERE)
    # Visitors of tests come over loopback, and not every machine has another address.
    monkeypatch.setattr(exchange, "is_loopback", lambda _: False)
    monkeypatch.setattr(exchange, "leads_elsewhere", lambda _: True)
    ending = threading.Event()
    wait = PrefixStore.wait

    def wait_or_end(self: PrefixStore, *words: object) -> None:
        if ending.is_set() and threading.current_thread() is thread:
            raise _EndError
        wait(self, *words)  # type: ignore[arg-type]

    def listen() -> None:
        with suppress(_EndError):
            receive(store, found.visits.put)

    monkeypatch.setattr(PrefixStore, "wait", wait_or_end)
    with serving_in_a_thread(0) as port, TCPStore(HERE, port, timeout=SECONDS) as store:
        PrefixStore(exchange._PREFIX, store).set(exchange._OPEN, b"")
        found = Practice(Endpoint(HERE, port), queue.SimpleQueue())
        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield found
        finally:
            ending.set()
            thread.join(SECONDS)
            assert not thread.is_alive()


def test_a_visit_and_a_second_one(practice: Practice) -> None:
    for _ in range(2):
        found = visit(practice.endpoint, [Finding("a", OK, "b")])
        assert found is not None
        assert practice.next_visit() == found
        assert [(way.start, way.goal, way.error) for way in found.ways] == [(0, 1, ""), (1, 0, "")]
        assert found.findings == {0: (), 1: (Finding("a", OK, "b"),)}
        assert not [each for each in judge_machines(found) if each.state is F]


@pytest.fixture
def one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A practice that attends one visitor at a time; it has to be there before the practice is."""
    monkeypatch.setattr(exchange, "_MOST_AT_ONCE", 1)


def test_a_visitor_that_finds_no_place_is_attended_when_there_is_one(
    one_place: None, practice: Practice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_VISIT_S", 0.3)
    with TCPStore(*practice.endpoint, timeout=SECONDS) as store:
        room = PrefixStore(exchange._PREFIX, store)
        room.queue_push(exchange._VISITORS, str(room.add(exchange._VISITS, 1)))
        room.wait(["visit/1/card/0"], SECONDS)  # it is being attended, and never says a word
        monkeypatch.setattr(exchange, "_VISIT_S", 4.0)
        found = visit(practice.endpoint, ())
    assert found is not None
    assert found.missing == []
    assert [practice.next_visit().missing for _ in range(2)] == [[1], []]


def test_there_is_no_visit_where_no_doctor_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_CONNECT_S", 0.1)
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
    assert visit(Endpoint(HERE, port), ()) is None
    assert visit(Endpoint("no-such-host.invalid", 1), ()) is None
    monkeypatch.undo()  # the store of a job takes its time
    with serving_in_a_thread(0) as port:
        assert visit(Endpoint(HERE, port), ()) is None
        with TCPStore(HERE, port, timeout=SECONDS) as store:
            assert store.num_keys() == 0, "nothing was left in it"


def test_a_visit_to_one_that_ends_meanwhile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one's doctor is interrupted while it is visited; it may be looked for that long."""
    monkeypatch.setattr(exchange, "_VISIT_S", 0.5)
    with ThreadPoolExecutor(1) as pool:
        with serving_in_a_thread(0) as port, TCPStore(HERE, port, timeout=SECONDS) as store:
            practice = PrefixStore(exchange._PREFIX, store)
            practice.set(exchange._OPEN, b"")
            future = pool.submit(visit, Endpoint(HERE, port), ())
            practice.wait(["visit/1/card/1"], SECONDS)
        with pytest.raises(RallypointError):
            future.result(SECONDS)


def test_a_listener_dials_only_the_address_from_which_a_visitor_came(
    practice: Practice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its card says: with and without the addresses that are never dialled."""
    monkeypatch.setattr(exchange, "_VISIT_S", 0.5)
    dialled = list[str]()

    def dial(start: int, goal: Card, address: str) -> Way:
        dialled.append(address)
        return Way(start, goal.number, address)

    monkeypatch.setattr(probes, "_try", dial)
    told = to_text(card(1, 22, "10.0.0.9", HERE, "169.254.169.254"))
    with TCPStore(*practice.endpoint, timeout=SECONDS) as store:
        room = PrefixStore(exchange._PREFIX, store)
        for visitor in ("1", "2"):
            room.set(f"visit/{visitor}/card/1", told)
            room.queue_push(exchange._VISITORS, visitor)
            [way] = practice.next_visit().ways
            assert dialled == [HERE]
            monkeypatch.setattr(exchange, "leads_elsewhere", situation.leads_elsewhere)
    assert way.error == f"not tried: it came from {HERE}, and that proves no address on its card"


def test_the_addresses_of_a_visitor_that_may_be_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "interfaces_out", lambda: [Interface("eth7", True, ("10.0.0.7",))])
    for text, origin, expected in (
        ("10.0.0.9 10.0.0.8", "10.0.0.8", "10.0.0.8"),
        ("fd00::9 10.0.0.8", "fd00::9", "fd00::9"),
        ("10.0.0.9", "203.0.113.5", ""),  # addresses are translated
        ("10.0.0.9", "", ""),
        (f"{HERE} 10.0.0.7 10.0.0.9", HERE, "10.0.0.7"),  # on this machine
        (f"{HERE} ::1 10.0.0.9", "::1", ""),
        ("169.254.169.254", "169.254.169.254", ""),
        ("fe80::1%eth0 fe80::1", "fe80::1%eth0", ""),
        ("0.0.0.0 224.0.0.1", "0.0.0.0", ""),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", ""),
    ):
        found = exchange.narrow_visitor(card(1, 22, *text.split()), origin)
        if expected:
            assert found == card(1, 22, expected)
        else:
            assert isinstance(found, Way)
            assert found.error.startswith(f"not tried: it came from {origin or 'an address'}"), origin


# The addresses of this machine -----------------------------------------------------------------------------


def test_the_address_towards_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        exchange, "interfaces_out", lambda: [Interface("eth7", True, ("10.0.0.7", "fd00::7"))]
    )
    with socket.create_server((HERE, 0)) as listener:
        place = Endpoint(HERE, listener.getsockname()[1])
        assert exchange.address_towards(place) == HERE
    assert exchange.address_towards(place) == "10.0.0.7"
    monkeypatch.setattr(exchange, "interfaces_out", list)
    assert exchange.own_address() == HERE


# What a launcher says --------------------------------------------------------------------------------------

PLAIN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
JOB = Launched(Endpoint("a", 1), 0, 2, True, True, "0")


def test_what_launchers_say() -> None:
    other = replace(JOB, number=1, holds_store=False)
    agent = Launched(Endpoint("a", 1), 1, 2, True, False, "3")
    without_port = {name: text for name, text in PLAIN.items() if name != "MASTER_PORT"}
    for environ, expected in (
        (PLAIN, JOB),
        ({**PLAIN, "RANK": "1"}, other),
        (TORCHRUN, replace(agent, is_first_here=False)),
        ({**TORCHRUN, "RANK": "4", "LOCAL_RANK": "0"}, agent),
        ({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}, replace(agent, number=0)),
        ({**PLAIN, "RANK": "4", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0"}, other),
        ({**PLAIN, "TORCHELASTIC_USE_AGENT_STORE": "False"}, JOB),
        (without_port, replace(JOB, endpoint=Endpoint("a", 29500))),
    ):
        assert by_launcher(environ) == expected, environ


def test_what_no_launcher_has_said() -> None:
    for missing in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        with pytest.raises(UsageError, match="--all is for a process that a launcher has started") as caught:
            by_launcher({name: text for name, text in PLAIN.items() if name != missing})
        assert "--no-python rallypoint doctor --all" in caught.value.hint


def test_a_launched_job_of_two_without_a_store_of_the_launchers() -> None:
    with socket.create_server((HERE, 0)) as probe:
        port = probe.getsockname()[1]
    environ = {**PLAIN, "MASTER_ADDR": HERE, "MASTER_PORT": str(port)}
    jobs = [by_launcher({**environ, "RANK": str(rank)}) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            exchange.attend_job, jobs, ([Finding("a", OK, "0")], [Finding("a", OK, "1")])
        )
    assert first == second
    assert (first.missing, set(first.findings)) == ([], {0, 1})
