"""What the doctor thinks of names, interfaces, limits, clocks, proxies and packages, by examples."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rallypoint
from rallypoint.doctor import clock, endpoint, interfaces, limits, names, packages, proxies
from rallypoint.doctor.situation import Situation
from rallypoint.findings import Finding, Fix, State, duration, failure, note, ok, unknown, warning, worst
from rallypoint.meeting.endpoint import Endpoint
from rallypoint.system.interfaces import Interface
from rallypoint.system.names import LookUps
from rallypoint.system.packages import ABSENT
from raw import SECONDS

ETHERNET = Interface("eth7", True, ("10.0.0.7", "fd00::7"))
LOOPBACK = Interface("lo", True, ("127.0.0.1", "::1"))


@pytest.fixture(autouse=True)
def _linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine happens to have says nothing about the rules."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(interfaces, "interfaces", lambda: [LOOPBACK, ETHERNET])


F, W = State.FAILURE, State.WARNING


def situation(
    environ: Mapping[str, str] | None = None, endpoint: Endpoint | None = None, folder: Path = Path()
) -> Situation:
    return Situation(environ or {}, endpoint, folder)


def told(findings: list[Finding]) -> list[tuple[State, str, str]]:
    return [(each.state, each.found, each.hint) for each in findings]


# Findings ------------------------------------------------------------------------------------------------

texts = st.text(max_size=20)
findings = st.builds(
    Finding,
    texts,
    st.sampled_from(State),
    texts,
    texts,
    st.none() | st.builds(Fix, st.sampled_from(["run", "env"]), texts, texts),
    st.floats(0, 1e6).map(lambda seconds: round(seconds, 3)),
)


@given(findings)
def test_a_finding_survives_json(finding: Finding) -> None:
    assert Finding.from_json(finding.as_json()) == finding


def test_a_finding_as_json() -> None:
    found = Finding("gloo", State.WARNING, "text", "do", Fix("env", "A", "1"), 0.12345)
    assert found.as_json() == {
        "name": "gloo",
        "state": "warning",
        "found": "text",
        "hint": "do",
        "fix": {"table": "env", "key": "A", "value": "1"},
        "seconds": 0.123,
    }


def test_the_worst_of_a_name() -> None:
    all_of = [ok("a", "1"), note("a", "2"), unknown("a", "3"), warning("a", "4"), failure("a", "5")]
    assert [worst(all_of[:count], "a") for count in range(6)] == [None, *all_of]
    assert worst([*all_of, failure("b", "6")], "a") == all_of[-1]
    assert worst([failure("a", "first"), failure("a", "second")], "a") == failure("a", "first")
    assert worst(all_of, "c") is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (0.000_016, "16 us"),
        (0.001, "1.0 ms"),
        (0.9, "900.0 ms"),
        (1.0, "1.0 s"),
        (75, "75.0 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# Limits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("soft", "hard", "world", "state", "found", "hint"),
    [
        (1024, 4096, None, State.OK, "a process may open 1,024 files: room for 960 ranks at one server", ""),
        (1023, 4096, None, W, "which is little for a training", "ulimit -n 4096"),
        (1023, 1 << 20, None, W, "which is little", "ulimit -n 65536"),
        (2064, 4096, 2000, State.OK, "room for 2,000 ranks", ""),
        (2063, 4096, 2000, W, "too few for 2,000 ranks at one server", "ulimit -n 2064"),
        (2063, 2064, 2000, W, "too few for 2,000 ranks", "ulimit -n 2064"),
        (
            2063,
            2063,
            2000,
            W,
            "too few for 2,000 ranks",
            "rallypoint run --relay=on; or have the limit of 2,063 raised",
        ),
        (
            sys.maxsize,
            sys.maxsize,
            None,
            State.OK,
            "open any number of files: room for any number of ranks",
            "",
        ),
    ],
)
def test_open_files(soft: int, hard: int, world: int | None, state: State, found: str, hint: str) -> None:
    finding = limits.judge_open_files(soft, hard, world)
    assert (finding.name, finding.state) == ("open-files", state)
    assert found in finding.found
    assert hint in finding.hint


@pytest.mark.parametrize(
    ("accepting", "half_open", "world", "state"),
    [
        (128, 128, None, State.OK),
        (128, 256, 128, State.OK),
        (128, 256, 129, W),
        (256, 128, 129, W),
        (4096, 4096, 129, State.OK),
    ],
)
def test_backlogs(accepting: int, half_open: int, world: int | None, state: State) -> None:
    finding = limits.judge_backlog(accepting, half_open, world)
    assert finding.state is state
    assert (
        f"{accepting:,} clients may wait on one socket (somaxconn), {half_open:,} half open" in finding.found
    )
    hint = f"sysctl -w net.core.somaxconn={world} net.ipv4.tcp_max_syn_backlog={world}"
    assert finding.hint.startswith(hint) == (state is W)


@pytest.mark.parametrize(
    ("total", "free", "state", "found"),
    [
        (64 << 20, 64 << 20, W, "/dev/shm has 64 MiB, 64 MiB free: little"),
        (8 << 30, (1 << 30) - 1, W, "8.0 GiB, 1024 MiB free"),
        (8 << 30, 1 << 30, State.OK, "/dev/shm has 8.0 GiB, 1.0 GiB free"),
    ],
)
def test_shared_memory(total: int, free: int, state: State, found: str) -> None:
    finding = limits.judge_shared_memory(total, free)
    assert finding.state is state
    assert found in finding.found
    assert ("--shm-size" in finding.hint) == (state is W)


def test_limits_that_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "open_files_allowed", lambda: None)
    monkeypatch.setattr(limits, "syn_backlog", lambda: None)
    monkeypatch.setattr(limits, "_SHARED_MEMORY", "/nowhere/at/all")
    [files] = limits.check_open_files(situation())
    [backlog] = limits.check_backlog(situation())
    [memory] = limits.check_shared_memory(situation())
    assert [files.state, backlog.state, memory.state] == [State.UNKNOWN, State.UNKNOWN, W]
    assert "there is no /nowhere/at/all" in memory.found
    monkeypatch.setattr(sys, "platform", "darwin")
    assert list(limits.check_shared_memory(situation())) == []


def test_limits_of_this_machine_are_judged_by_the_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "open_files_allowed", lambda: (2000, 4000))
    monkeypatch.setattr(limits, "accept_backlog", lambda: 3000)
    monkeypatch.setattr(limits, "syn_backlog", lambda: 2500)
    big, small = situation({"WORLD_SIZE": "2600"}), situation({"WORLD_SIZE": "1900"})
    assert [each.state for each in (*limits.check_open_files(big), *limits.check_backlog(big))] == [W, W]
    good = [*limits.check_open_files(small), *limits.check_backlog(small)]
    assert [each.state for each in good] == [State.OK, State.OK]


# The clock -----------------------------------------------------------------------------------------------

UNSYNCHRONISED = (
    "1970-01-01 00:16:40 UTC; the system says that it is not synchronised: "
    "times of several machines may not compare",
    "timedatectl set-ntp true, on the machine itself if this is a container",
)


@pytest.mark.parametrize(
    ("now", "synchronised", "machines", "expected"),
    [
        (1000.0, True, 2, (State.OK, "1970-01-01 00:16:40 UTC, synchronised", "")),
        (1000.0, None, 2, (State.OK, "1970-01-01 00:16:40 UTC", "")),
        (1000.0, False, 1, (State.NOTE, *UNSYNCHRONISED)),
        (1000.0, False, 2, (W, *UNSYNCHRONISED)),
        (
            999.0,
            True,
            1,
            (
                F,
                "1970-01-01 00:16:39 UTC lies before Rallypoint was installed, 1970-01-02",
                "timedatectl set-ntp true",
            ),
        ),
    ],
)
def test_clocks(
    now: float, synchronised: bool | None, machines: int, expected: tuple[State, str, str]
) -> None:
    assert told([clock.judge_clock(now, 1000.0 + 86_400.0, synchronised, machines)]) == [expected]


def test_a_clock_is_not_blamed_for_a_file_that_was_written_elsewhere() -> None:
    assert clock.judge_clock(1_000_000.0, 1_050_000.0, None).state is State.OK


def test_the_clock_of_this_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    [found] = clock.check_clock(situation())
    assert found.name == "clock"
    assert found.state is not State.FAILURE
    monkeypatch.setattr(clock, "_is_synchronised", lambda: False)
    for place, state in ((Endpoint("127.0.0.1", 1), State.NOTE), (Endpoint("node-a", 1), W)):
        [found] = clock.check_clock(situation(endpoint=place))
        assert found.state is state


def test_a_system_that_does_not_know_whether_its_clock_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert clock._is_synchronised() is None
    monkeypatch.setattr(sys, "platform", "linux")
    for state, synchronised in ((-1, None), (0, True), (4, True), (5, False)):
        library = SimpleNamespace(adjtimex=lambda _, state=state: state)
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, library=library, **__: library)
        assert clock._is_synchronised() is synchronised
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    assert clock._is_synchronised() is None


# Names ---------------------------------------------------------------------------------------------------

USE_ETHERNET = Fix("env", "GLOO_SOCKET_IFNAME", "eth7")


@pytest.mark.parametrize(
    ("addresses", "seconds", "state", "found"),
    [
        (["10.0.0.7"], 0.5, State.OK, "me is 10.0.0.7, found in 500 ms"),
        (["10.0.0.7"], 0.501, W, "me is 10.0.0.7, found in 501 ms: slow"),
        (["127.0.1.1", "10.0.0.7"], 0.0, State.OK, "me is 127.0.1.1, 10.0.0.7, found in 0 ms"),
        (["fe80::1%eth0"], 0.0, State.OK, "me is fe80::1%eth0"),
        (["127.0.1.1"], 0.0, W, "found in 0 ms: gloo would listen where no other machine reaches it"),
        (["::1", "127.0.0.1"], 9.0, W, "gloo would listen where no other machine reaches it"),
    ],
)
def test_addresses_of_the_own_name(addresses: list[str], seconds: float, state: State, found: str) -> None:
    finding = names.judge_addresses("me", addresses, seconds, 2)
    assert (finding.name, finding.state) == ("host-name", state)
    assert found in finding.found
    assert (finding.fix == USE_ETHERNET) == ("gloo" in finding.found)
    assert (finding.hint == "export GLOO_SOCKET_IFNAME=eth7") == ("gloo" in finding.found)


def test_an_own_name_that_is_loopback_does_for_one_machine() -> None:
    """Nothing is to be done then, so nothing is written by --fix; but it is said what several would need."""
    found = names.judge_addresses("me", ["127.0.1.1"], 0.0, 1)
    assert told([found]) == [
        (
            State.NOTE,
            "me is 127.0.1.1, found in 0 ms: fine for jobs on this machine alone; "
            "for several: export GLOO_SOCKET_IFNAME=eth7",
            "",
        )
    ]
    assert found.fix is None


@pytest.mark.parametrize(
    ("environ", "place", "state"),
    [
        ({}, None, State.NOTE),
        ({}, Endpoint("localhost", 1), State.NOTE),
        ({}, Endpoint("node-a", 1), W),
        ({"GROUP_WORLD_SIZE": "2"}, None, W),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, None, State.NOTE),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, Endpoint("node-a", 1), State.OK),
        ({"GLOO_SOCKET_IFNAME": ""}, Endpoint("node-a", 1), W),
    ],
)
def test_what_the_own_name_is_to_gloo_depends_on_what_is_meant(
    environ: dict[str, str], place: Endpoint | None, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    monkeypatch.setattr(names, "resolve", lambda _: (["127.0.1.1"], 0.0))
    [found] = names.check_host_name(situation(environ, place))
    assert found.state is state
    assert (found.fix == USE_ETHERNET) == (state is W)
    if state is State.OK:
        assert found.found == "me is 127.0.1.1; gloo takes eth9, by GLOO_SOCKET_IFNAME"


def test_without_an_interface_that_leads_out_the_hosts_file_is_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interfaces, "interfaces", lambda: [LOOPBACK])
    finding = names.judge_addresses("me", ["127.0.0.1"], 0.0, 2)
    assert finding.fix is None
    assert finding.hint.startswith("give me its address in the hosts file")
    finding = names.judge_addresses("me", ["127.0.0.1"], 0.0, 1)
    assert "for several: give me its address in the hosts file" in finding.found


@pytest.mark.parametrize(
    ("name", "state", "found"),
    [
        ("12", F, "12 is a number, and resolvers read it as the address 0.0.0.12"),
        ("0x7f000001", F, "0x7f000001 is a number, and resolvers read it as the address 127.0.0.1"),
        ("9" * 12, F, "is a number, and resolvers read it as the address of another machine"),
        ("0123456789ab", W, "0123456789ab looks like the id of a container"),
    ],
)
def test_host_names_that_are_something_else(
    name: str, state: State, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(names, "resolve", lambda _: (["10.0.0.7"], 0.0))
    first, second = names.check_host_name(situation())
    assert (first.state, second.state) == (state, State.OK)
    assert found in first.found


@pytest.mark.parametrize("name", ["node-1", "0123456789a", "0123456789abc", "node12", "vm"])
def test_host_names_that_are_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(names, "resolve", lambda _: (["10.0.0.7"], 0.0))
    assert [each.state for each in names.check_host_name(situation())] == [State.OK]


@pytest.mark.parametrize(
    ("error", "state", "found"),
    [
        (TimeoutError(), F, "me: no answer within 3 s"),
        (
            socket.gaierror(-2, "Name or service not known"),
            W,
            "me does not resolve here (Name or service not",
        ),
        (OSError("it is no name: x"), W, "me does not resolve here (it is no name: x): gloo would listen"),
    ],
)
def test_an_own_name_that_does_not_resolve(
    error: OSError, state: State, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> tuple[list[str], float]:
        raise error

    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    monkeypatch.setattr(names, "resolve", fail)
    [finding] = names.check_host_name(situation({"GROUP_WORLD_SIZE": "2"}))
    assert (finding.state, finding.found.startswith(found)) == (state, True), finding
    assert finding.hint
    [finding] = names.check_host_name(situation())
    assert finding.state is (State.NOTE if state is W else state)


def test_names_are_resolved_or_are_none() -> None:
    addresses, seconds = names.resolve("127.0.0.1")
    assert addresses == ["127.0.0.1"]
    assert 0 <= seconds < 3
    with pytest.raises(OSError, match="it is no name"):
        names.resolve("a" * 70 + ".b")


def test_reverse_look_ups_that_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, state in ((1.0, State.OK), (1.001, W)):
        monkeypatch.setattr(names, "look_up", lambda _, seconds=seconds: LookUps(9, seconds))
        [found] = names.check_reverse(situation())
        assert (found.name, found.state) == ("reverse-look-up", state)
        assert "9 look-ups of ::ffff:127.0.0.1 took 1 s" in found.found


def test_a_reverse_look_up_that_has_no_answer_says_how_many_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that loses one of many is another fault than one that does not answer at all."""
    never = threading.Event()

    def stall(answered: Callable[[float], object]) -> LookUps:
        for number in range(7):
            answered(number / 100)
        never.wait(SECONDS)
        return LookUps(8, 9.0)

    monkeypatch.setattr(names, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(names, "look_up", stall)
    try:
        [found] = names.check_reverse(situation())
    finally:
        never.set()
    assert found.state is W
    assert found.found.startswith(
        "after 7 look-ups of ::ffff:127.0.0.1, one had no answer in time (0.05 s in all)"
    )
    assert "::ffff:127.0.0.1 localhost" in found.hint


# Interfaces ----------------------------------------------------------------------------------------------

UP = ["lo", "eth0", "ens3f1", "ib0"]


@pytest.mark.parametrize(
    ("variable", "text", "good"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", True),
        ("GLOO_SOCKET_IFNAME", "eth0:1", True),
        ("GLOO_SOCKET_IFNAME", "eth0,eth1", False),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("TP_SOCKET_IFNAME", "ib0", True),
        ("TP_SOCKET_IFNAME", "ib", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "bond,eth0", True),
        ("NCCL_SOCKET_IFNAME", "bond", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=bond0,eth0", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
        ("NCCL_SOCKET_IFNAME", "^=eth0", True),
        ("NCCL_SOCKET_IFNAME", "eth0:1", True),
    ],
)
def test_interfaces_that_variables_name(variable: str, text: str, good: bool) -> None:
    finding = interfaces.judge_interface(variable, text, UP)
    assert finding.state is (State.OK if good else F)
    assert f"{variable}={text}" in finding.found
    if not good:
        assert "the interfaces that are up are lo, eth0, ens3f1, ib0" in finding.found
        assert finding.hint == f"export {variable}=eth0"


def test_where_only_loopback_is_up_that_is_the_hint() -> None:
    assert interfaces.judge_interface("GLOO_SOCKET_IFNAME", "eth0", ["lo"]).hint.endswith("=lo")


def test_interfaces_are_told_and_the_variables_judged_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    down = Interface("eth8", False, ("10.0.0.8",))
    bridge = Interface("docker0", True, ("172.17.0.1",))
    monkeypatch.setattr(interfaces, "interfaces", lambda: [LOOPBACK, down, bridge, ETHERNET])
    environ = {"GLOO_SOCKET_IFNAME": "eth8", "NCCL_SOCKET_IFNAME": "docker"}
    found = list(interfaces.check_interfaces(situation(environ)))
    assert [each.state for each in found] == [State.OK, F, State.OK]
    assert found[0].found == "eth7 (10.0.0.7, fd00::7)"
    assert interfaces.way_out() == ETHERNET
    assert interfaces.use_interface() == USE_ETHERNET


@pytest.mark.parametrize(
    ("address", "name"), [("10.0.0.8", "eth8"), ("fd00::7", "eth7"), ("172.17.0.1", "eth7"), ("", "eth7")]
)
def test_the_way_out_is_the_one_of_the_default_route(
    address: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that leads to other machines, as one to containers does not."""
    bridge, other = Interface("docker0", True, ("172.17.0.1",)), Interface("eth8", True, ("10.0.0.8",))
    monkeypatch.setattr(interfaces, "interfaces", lambda: [LOOPBACK, bridge, ETHERNET, other])
    monkeypatch.setattr(interfaces, "_address_of_default_route", lambda: address)
    found = interfaces.way_out()
    assert found is not None
    assert found.name == name


def test_a_machine_without_a_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Unreachable)
    assert interfaces._address_of_default_route() == ""


def test_interfaces_that_lead_nowhere_or_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "interfaces", lambda: [LOOPBACK])
    assert [each.state for each in interfaces.check_interfaces(situation())] == [W]
    assert (interfaces.way_out(), interfaces.use_interface()) == (None, None)

    def refuse() -> list[Interface]:
        raise OSError("no rights")

    monkeypatch.setattr(interfaces, "interfaces", refuse)
    [found] = interfaces.check_interfaces(situation())
    assert (found.state, found.found) == (State.UNKNOWN, "the system does not tell them: no rights")
    assert interfaces.way_out() is None


@pytest.mark.parametrize(
    ("has", "state", "found"),
    [
        ((True, True), State.OK, "IPv4 and IPv6"),
        ((True, False), State.OK, "IPv4 only"),
        ((False, True), W, "IPv6 only"),
        ((False, False), F, "no socket can be bound"),
    ],
)
def test_address_families(
    has: tuple[bool, bool], state: State, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = dict(zip((socket.AF_INET, socket.AF_INET6), has, strict=True))
    monkeypatch.setattr(interfaces, "_can_bind", lambda family, _: answers[family])
    [finding] = interfaces.check_families(situation())
    assert (finding.state, finding.found.startswith(found)) == (state, True)


def test_a_family_that_can_be_bound_and_an_address_that_cannot() -> None:
    assert interfaces._can_bind(socket.AF_INET, "127.0.0.1")
    assert not interfaces._can_bind(socket.AF_INET, "203.0.113.7")


# The endpoint's name -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "addresses", "is_here", "warns"),
    [
        ("me", ["127.0.1.1"], True, True),
        ("me", ["127.0.1.1", "::1"], True, True),
        ("me", ["127.0.1.1", "10.0.0.7"], True, False),
        ("me", ["10.0.0.7"], True, False),
        ("localhost", ["127.0.0.1"], True, False),
        ("127.0.0.1", ["127.0.0.1"], True, False),
        ("other", ["127.0.1.1"], False, False),
        ("other", ["fe80::1%eth0"], True, False),
    ],
)
def test_names_that_lead_each_machine_to_itself(
    host: str, addresses: list[str], is_here: bool, warns: bool
) -> None:
    assert bool(list(endpoint.judge_reach(host, addresses, is_here))) == warns


def test_what_the_name_of_the_endpoint_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "resolve", lambda host: (["10.0.0.7"], 0.004))
    for here, whose in ((True, "this machine"), (False, "another machine")):
        monkeypatch.setattr(endpoint, "is_this_machine", lambda _, here=here: here)
        [found] = endpoint.check_endpoint(situation(endpoint=Endpoint("me", 1)))
        assert told([found]) == [(State.OK, f"me is 10.0.0.7, found in 4 ms, and {whose}", "")]
        [found] = endpoint.check_endpoint(situation(endpoint=Endpoint("10.0.0.7", 1)))
        assert found.found == f"10.0.0.7 is {whose}"
    assert list(endpoint.check_endpoint(situation())) == []


@pytest.mark.parametrize(
    ("host", "hint"),
    [
        ("node.local", "mDNS names need a resolver"),
        ("node-b", "use its address, or add node-b to the hosts file"),
    ],
)
def test_an_endpoint_whose_name_means_nothing(host: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> tuple[list[str], float]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(endpoint, "resolve", fail)
    [found] = endpoint.check_endpoint(situation(endpoint=Endpoint(host, 1)))
    assert (found.state, found.found) == (F, f"{host} does not resolve here (Name or service not known)")
    assert found.hint.startswith(hint)


# Proxies -------------------------------------------------------------------------------------------------


def test_proxies_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "listening_ports", lambda: {22, 29_500})
    [found] = proxies.check_proxies(situation({"http_proxy": ""}, Endpoint("node-a", 1)))
    assert found.state is State.OK
    assert found.found.startswith("no proxy is set")


@pytest.mark.parametrize(
    ("host", "exceptions", "excepted"),
    [
        ("node-a", "", False),
        ("node-a", "node-a", True),
        ("node-a", "x, node-a ,y", True),
        ("node-a.cluster", ".cluster", True),
        ("node-a.cluster", "*.cluster", True),
        ("node-a.cluster", "cluster", True),
        ("node-acluster", "cluster", False),
        ("node-a", "*", True),
        ("node-a", "node", False),
        ("node-a", ",,", False),
    ],
)
def test_hosts_that_are_excepted_from_proxies(host: str, exceptions: str, excepted: bool) -> None:
    environ = {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": exceptions}
    [found] = proxies._check_proxies(situation(environ, Endpoint(host, 1)))
    assert found.state is (State.OK if excepted else W)
    assert found.found.startswith("https_proxy is set")
    assert (f"{host} over HTTP" in found.found) != excepted


def test_a_proxy_without_an_endpoint_is_only_told() -> None:
    [found] = proxies._check_proxies(situation({"http_proxy": "p", "ALL_PROXY": "p"}))
    assert told([found]) == [(State.OK, "http_proxy, all_proxy are set: stores and gloo do not use it", "")]


@pytest.mark.parametrize(
    ("environ", "ports", "signs"),
    [
        ({"ISTIO_META_X": "1"}, set(), {"Istio": "the variable ISTIO_META_X"}),
        ({}, {15_006, 15_001}, {"Istio": "port 15001, port 15006"}),
        ({}, {4_143}, {"Linkerd": "port 4143"}),
        ({"LINKERD_X": "1"}, {15_090}, {"Istio": "port 15090", "Linkerd": "the variable LINKERD_X"}),
        ({"PATH": "1"}, {80}, {}),
    ],
)
def test_sidecars(environ: dict[str, str], ports: set[int], signs: dict[str, str]) -> None:
    found = list(proxies._check_meshes(environ, ports))
    assert len(found) == len(signs)
    for finding, (name, sign) in zip(found, signs.items(), strict=True):
        assert finding.state is W
        assert f"a sidecar of {name} seems to be here ({sign})" in finding.found
        assert "inject" in finding.hint


def test_a_sidecar_by_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/etc/istio/proxy")
    [found] = proxies._check_meshes({}, set())
    assert "(/etc/istio/proxy)" in found.found


# Packages ------------------------------------------------------------------------------------------------


def test_this_python_and_its_packages() -> None:
    [python] = packages.check_python(situation())
    assert python.state is State.OK
    assert ".".join(map(str, sys.version_info[:3])) in python.found
    assert set(packages.versions()) == {"python", "rallypoint", "torch", "accelerate"}


def test_a_python_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    [python] = packages.check_python(situation())
    assert (python.state, python.hint) == (F, "Rallypoint needs Python 3.10 or later")


def test_packages_and_a_torch_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.13.0", "numpy": "2"}
    monkeypatch.setattr(packages, "installed", lambda name: there.get(name, ABSENT))
    [found] = packages.check_packages(situation())
    assert found.found.endswith(", torch 2.13.0, numpy 2")
    del there["numpy"]
    [found] = packages.check_packages(situation())
    assert (found.state, found.hint) == (W, "pip install numpy")
    there.clear()
    [found] = packages.check_packages(situation())
    assert (found.state, found.found) == (
        State.OK,
        f"rallypoint {rallypoint.__version__}",
    )


def test_an_event_loop_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    [found] = packages.check_event_loop(situation())
    assert found.state is State.OK
    monkeypatch.setattr(packages, "LOOP_PACKAGE", "no_such_loop")
    [found] = packages.check_event_loop(situation())
    assert (found.state, found.hint) == (W, "pip install no_such_loop")
    assert "No module named 'no_such_loop'" in found.found
