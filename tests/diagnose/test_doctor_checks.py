"""What the doctor makes of names, interfaces, limits, clocks, proxies and packages: a table of judgements."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import strategies as st

import rallypoint
from rallypoint.build import in_use
from rallypoint.diagnose.doctor import machine, network, stores
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.doctor.stores import Met
from rallypoint.diagnose.findings import Finding, Fix, State, worst
from rallypoint.launch.endpoint import Endpoint
from rallypoint.store.machine import interfaces
from rallypoint.store.machine.addresses import is_own_address
from rallypoint.store.machine.interfaces import Interface, LookUps
from rallypoint.store.machine.system import ABSENT
from raw import SECONDS

ETHERNET = Interface("eth7", True, ("10.0.0.7", "fd00::7"))
LOOPBACK = Interface("lo", True, ("127.0.0.1", "::1"))
REAL_INTERFACES = interfaces.interfaces
F, W, OK = State.FAILURE, State.WARNING, State.OK
N, U = State.NOTE, State.UNKNOWN


@pytest.fixture(autouse=True)
def _linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine happens to have says nothing about the rules."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(network, "interfaces", lambda: [LOOPBACK, ETHERNET])


def situation(environ: Mapping[str, str] | None = None, endpoint: Endpoint | None = None) -> Situation:
    return Situation(environ or {}, endpoint, Path())


def told(finding: Finding) -> tuple[State, str, str]:
    return finding.state, finding.found, finding.hint


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


def test_the_worst_of_a_name() -> None:
    all_of = [Finding("a", state, "") for state in (OK, N, U, W, F)]
    assert [worst(all_of[:count], "a") for count in range(6)] == [None, *all_of]
    assert worst([*all_of, Finding("b", F, "6")], "a") == all_of[-1]
    assert worst([Finding("a", F, "first"), Finding("a", F, "second")], "a") == Finding("a", F, "first")
    assert worst(all_of, "c") is None


# Judgements ----------------------------------------------------------------------------------------------

Row = tuple[Finding, State, str, str]
A = Endpoint("a", 1)
HARD = "2,063 is the hard limit, which an administrator has to raise"
SYSCTL = "sysctl -w net.core.somaxconn=129 net.ipv4.tcp_max_syn_backlog=129"
CLOCK = "1970-01-01 00:16:40 UTC"
UNSURE = f"{CLOCK}; the system says that it is not synchronised: times of several machines may not compare"
SET_CLOCK = "timedatectl set-ntp true"
BEFORE = "1970-01-01 00:16:39 UTC lies before Rallypoint was installed, 1970-01-02"
X_LOCKS = "locks hold in X: for jobs on this machine"
X_SHARED = "locks hold in X, a shared file system"
WAIT = "clients may wait on one socket (somaxconn)"


def judgements() -> list[Row]:
    """A finding, its state, a part of what it says and of its hint; an empty hint is none."""
    files, backlog, clock = machine.judge_open_files, machine.judge_backlog, machine.judge_clock
    locks, nobody, store = machine.judge_locks, stores.judge_nobody, stores.judge_store
    refused, far = ConnectionRefusedError(), "doctor --listen --endpoint a:1"
    own, day = network.judge_addresses, 1000.0 + 86_400.0
    return [
        (files(1024, 4096, None), OK, "a process may open 1,024 files: room for 960 ranks at one server", ""),
        (files(1023, 4096, None), W, "which is little for a training", "ulimit -n 4096"),
        (files(1023, 1 << 20, None), W, "which is little", "ulimit -n 65536"),
        (files(64, 64, None), W, "which is little", "64 is the hard limit, which an administrator"),
        (files(2064, 4096, 2000), OK, "room for 2,000 ranks", ""),
        (files(2063, 2064, 2000), W, "too few for 2,000 ranks at one server", "ulimit -n 2064"),
        (files(2063, 2063, 2000), W, "too few for 2,000", f"rallypoint run --relay=on; or {HARD}"),
        (files(sys.maxsize, sys.maxsize, None), OK, "any number of files: room for any number of ranks", ""),
        (backlog(128, 128, None), OK, f"128 {WAIT}, 128 half open", ""),
        (backlog(128, 256, 128), OK, f"128 {WAIT}, 256 half open", ""),
        (backlog(128, 256, 129), W, "of 129 ranks that start at once", SYSCTL),
        (backlog(256, 128, 129), W, "of 129 ranks that start at once", SYSCTL),
        (clock(1000.0, day, True, 2), OK, f"{CLOCK}, synchronised", ""),
        (clock(1000.0, day, None, 2), OK, CLOCK, ""),
        (clock(1000.0, day, False, 1), N, UNSURE, f"{SET_CLOCK}, on the machine itself if this is a"),
        (clock(1000.0, day, False, 2), W, UNSURE, f"{SET_CLOCK}, on the machine itself if this is a"),
        (clock(999.0, day, True, 1), F, BEFORE, SET_CLOCK),
        (clock(1_000_000.0, 1_050_000.0, None), OK, "", ""),  # a file of elsewhere may be younger
        (locks("X", "ext4", True), OK, X_LOCKS, ""),
        (locks("X", "", True), OK, X_LOCKS, ""),
        (locks("X", "nfs4", True), OK, X_SHARED, ""),
        (locks("X", "fuse.glusterfs", True), OK, X_SHARED, ""),
        (locks("X", "nfs", False), F, "in X a second process gets a lock", "choose a local folder"),
        # Right before a job an endpoint says that nobody is there; else something is in the way.
        (nobody(A, refused, True), OK, "nothing listens at a:1 yet", ""),
        (nobody(A, refused, False), W, "the machine at a answers, but nothing listens on port 1 yet", far),
        (nobody(A, TimeoutError(), False), F, "a:1 cannot be reached: no answer within 2 s", "firewall"),
        (nobody(A, OSError(113, "No route"), True), F, "a:1 is this machine, but cannot be", "firewall"),
        (nobody(A, OSError("odd"), False), F, "a:1 cannot be reached: odd", "firewall"),
        (nobody(A, socket.gaierror(-2, "x"), False), U, "was not looked for, since a does not resolve", ""),
        (store(A, Met("X", 0.05, 3), 2.0), OK, "X at a:1, with 3 keys, answers in 50.0 ms", ""),
        (store(A, Met("X", 0.0501, 1), 2.0), W, "X at a:1, with 1 key, answers in 50.1 ms: slow", "far away"),
        (store(A, Met("X", 0.001, 0), 2.001), W, "but took 2.00 s to accept us: it looks up names", "see"),
        (own("me", ["10.0.0.7"], 0.5, 2), OK, "me is 10.0.0.7, found in 500 ms", ""),
        (own("me", ["10.0.0.7"], 0.501, 2), W, "found in 501 ms: slow", "add me to the hosts file"),
        (own("me", ["127.0.1.1", "10.0.0.7"], 0.0, 2), OK, "me is 127.0.1.1, 10.0.0.7, found in 0 ms", ""),
        (own("me", ["fe80::1%eth0"], 0.0, 2), OK, "me is fe80::1%eth0", ""),
        (
            own("me", ["::1", "127.0.0.1"], 9.0, 2),
            W,
            "gloo would listen where no other",
            "SOCKET_IFNAME=eth7",
        ),
        # One machine needs no fix, so --fix writes none; but the finding says what several would need.
        (own("me", ["127.0.1.1"], 0.0, 1), N, "for several: export GLOO_SOCKET_IFNAME=eth7", ""),
        *((network.FAMILIES[key], state, found, hint) for key, state, found, hint in FAMILIES),
    ]


FAMILIES = (
    ((True, True), OK, "IPv4 and", ""),
    ((True, False), OK, "IPv4 only", ""),
    ((False, True), W, "IPv6 only", "without brackets"),
    ((False, False), F, "no socket", "file://"),
)


def test_judgements() -> None:
    for finding, state, found, hint in judgements():
        assert (finding.state, bool(finding.hint)) == (state, bool(hint)), finding
        assert found in finding.found
        assert hint in finding.hint


# Limits --------------------------------------------------------------------------------------------------


def test_open_files_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.open_files_allowed() == resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, -1))
    assert machine.open_files_allowed() == (1024, sys.maxsize)
    monkeypatch.setattr(sys, "platform", "win32")
    assert machine.open_files_allowed() == (sys.maxsize, sys.maxsize)


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for total, free, state, found in (
        (64 << 20, 64 << 20, W, "/dev/shm has 64.0 MiB, 64.0 MiB free: little"),
        (8 << 30, (1 << 30) - 1, W, "8.00 GiB, 1,024 MiB free"),
        (8 << 30, 1 << 30, OK, "/dev/shm has 8.00 GiB, 1.00 GiB free"),
    ):
        usage = SimpleNamespace(total=total, free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        [finding] = machine.check_shared_memory(situation())
        assert (finding.state, found in finding.found) == (state, True)
        assert ("--shm-size" in finding.hint) == (state is W)


def test_limits_that_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "syn_backlog", lambda: None)
    monkeypatch.setattr(machine, "_SHARED_MEMORY", "/nowhere/at/all")
    here = situation()
    found = [*machine.check_backlog(here), *machine.check_shared_memory(here)]
    assert [each.state for each in found] == [U, W]
    assert "there is no /nowhere/at/all" in found[-1].found
    monkeypatch.setattr(sys, "platform", "darwin")
    assert list(machine.check_shared_memory(here)) == []


def test_limits_of_this_machine_are_judged_by_the_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "open_files_allowed", lambda: (2000, 4000))
    monkeypatch.setattr(machine, "accept_backlog", lambda: 3000)
    monkeypatch.setattr(machine, "syn_backlog", lambda: 2500)
    for world, state in (("2600", W), ("1900", OK)):
        here = situation({"WORLD_SIZE": world})
        found = [*machine.check_open_files(here), *machine.check_backlog(here)]
        assert [each.state for each in found] == [state, state]


# The clock -----------------------------------------------------------------------------------------------


def test_the_clock_of_this_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_is_synchronised", lambda: False)
    for place, state in ((Endpoint("127.0.0.1", 1), N), (Endpoint("node-a", 1), W)):
        [found] = machine.check_clock(situation(endpoint=place))
        assert found.state is state


def test_a_system_that_does_not_know_whether_its_clock_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for state, synchronised in ((-1, None), (0, True), (4, True), (5, False)):
        library = SimpleNamespace(adjtimex=lambda _, state=state: state)
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, library=library, **__: library)
        assert machine._is_synchronised() is synchronised
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    assert machine._is_synchronised() is None


# Names ---------------------------------------------------------------------------------------------------

USE_ETHERNET = Fix("env", "GLOO_SOCKET_IFNAME", "eth7")


def test_what_the_own_name_is_to_gloo_depends_on_what_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    monkeypatch.setattr(network, "resolve", lambda _: (["127.0.1.1"], 0.0))
    elsewhere = Endpoint("node-a", 1)
    for environ, place, state in (
        ({}, None, N),
        ({}, elsewhere, W),
        ({"GROUP_WORLD_SIZE": "2"}, None, W),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, elsewhere, OK),
        ({"GLOO_SOCKET_IFNAME": ""}, elsewhere, W),
    ):
        [found] = network.check_host_name(situation(environ, place))
        assert found.state is state
        assert (found.fix == USE_ETHERNET) == (state is W)
        if state is OK:
            assert found.found == "me is 127.0.1.1; gloo takes eth9, by GLOO_SOCKET_IFNAME"


def test_host_names_that_are_something_else() -> None:
    number = "is a number, and resolvers read it as the address"
    for name, state, text in (
        ("12", F, f"12 {number} 0.0.0.12"),
        ("0x7f000001", F, f"0x7f000001 {number} 127.0.0.1"),
        ("9" * 12, F, f"{'9' * 12} {number} of another machine"),
        ("0123456789ab", W, "0123456789ab looks like the id of a container"),
    ):
        [found] = network.judge_spelling(name)
        assert (found.state, found.found.startswith(text)) == (state, True)
    for name in ("node-1", "0123456789a", "0123456789abc", "vm"):
        assert list(network.judge_spelling(name)) == []


def test_an_own_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    unknown_name = socket.gaierror(-2, "Name or service not known")
    for error, state, found in (
        (TimeoutError(), F, "me: no answer within 3 s"),
        (unknown_name, W, "me does not resolve here (Name or service not known): gloo would listen"),
        (OSError("it is no name: x"), W, "me does not resolve here (it is no name: x): gloo would listen"),
    ):

        def fail(_: str, error: OSError = error) -> tuple[list[str], float]:
            raise error

        monkeypatch.setattr(network, "resolve", fail)
        [finding] = network.check_host_name(situation({"GROUP_WORLD_SIZE": "2"}))
        assert (finding.state, finding.found.startswith(found)) == (state, True), finding
        assert finding.hint
        [finding] = network.check_host_name(situation())
        assert finding.state is (N if state is W else state)


def test_names_are_resolved_or_are_none() -> None:
    addresses, seconds = network.resolve("127.0.0.1")
    assert addresses == ["127.0.0.1"]
    assert seconds >= 0
    with pytest.raises(OSError, match="it is no name"):
        network.resolve("a" * 70 + ".b")


def test_reverse_look_ups_that_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, state in ((1.0, OK), (1.001, W)):
        monkeypatch.setattr(network, "time_look_ups", lambda _, seconds=seconds: LookUps(9, seconds))
        [found] = network.check_reverse(situation())
        assert found.state is state
        assert "9 look-ups of ::ffff:127.0.0.1 took 1 s" in found.found


def test_a_reverse_look_up_that_has_no_answer_says_how_many_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that loses one of many is another fault than one that does not answer at all."""
    never = threading.Event()

    def stall(answered: Callable[[float], object]) -> LookUps:
        for number in range(7):
            answered(number / 100)
        never.wait(SECONDS)
        return LookUps(8, 9.0)

    monkeypatch.setattr(network, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(network, "time_look_ups", stall)
    try:
        [found] = network.check_reverse(situation())
    finally:
        never.set()
    assert found.state is W
    assert found.found.startswith(
        "after 7 look-ups of ::ffff:127.0.0.1, one had no answer in time (0.05 s in all)"
    )
    assert "::ffff:127.0.0.1 localhost" in found.hint


# Interfaces ----------------------------------------------------------------------------------------------


def test_interfaces_that_lead_out() -> None:
    real = ["eth0", "bridge0", "ens3f1", "ib0", "bond0", "wlan0", "en0"]
    virtual = ["docker0", "br-1234", "veth12", "tun0", "tap0", "wg0", "tailscale0", "utun3"]
    virtual += ["lxdbr0", "kube-ipvs0", "vEthernet (x)"]
    assert [name for name in real + virtual if Interface(name, True, ("10.0.0.1",)).leads_out] == real
    assert Interface("eth0", True, ("fd00::1",)).leads_out
    assert not Interface("eth0", False, ("10.0.0.1",)).leads_out, "it is down"
    assert not Interface("eth0", True, ()).leads_out
    for loopback in ("127.0.0.1", "::1"):
        assert not Interface("lo", True, (loopback,)).leads_out


def test_interfaces_with_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(family: int, address: str) -> object:
        return SimpleNamespace(family=family, address=address)

    six, four, link = socket.AF_INET6, socket.AF_INET, -1
    there = {
        "eth0": [
            entry(six, "fd00::1"),
            entry(link, "00:11"),
            entry(four, "10.0.0.1"),
            entry(six, "FE80::1%eth0"),
            entry(four, "169.254.7.7"),
        ],
        "eth1": [entry(four, "169.254.7.8")],
        "gone": [],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(isup=True)})
    assert REAL_INTERFACES() == [
        Interface("eth0", True, ("10.0.0.1", "fd00::1")),
        Interface("eth1", False, ()),
        Interface("gone", False, ()),
    ]


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), RuntimeError("no"), PermissionError(13, "no")])
def test_interfaces_that_the_system_does_not_tell(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise error

    monkeypatch.setattr(psutil, "net_if_stats", refuse)
    with pytest.raises(OSError):  # noqa: PT011 - whatever it says
        REAL_INTERFACES()


def test_interfaces_that_variables_name() -> None:
    """gloo and tensorpipe take names; NCCL takes beginnings of names, with signs for something else."""
    up = ["lo", "eth0", "ens3f1", "ib0"]
    exact, nccl = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
    for variable, good, wrong in (
        (exact, ("eth0", "eth0,ib0", "eth0:1"), ("eth0,eth1", "eth")),
        ("TP_SOCKET_IFNAME", ("ib0",), ("ib",)),
        (
            nccl,
            ("eth", "bond,eth0", "=eth0", "=bond0,eth0", "^docker,lo", "^=eth0", "eth0:1"),
            ("bond", "=eth"),
        ),
    ):
        for text in (*good, *wrong):
            finding = network.judge_interface(variable, text, up)
            assert finding.state is (OK if text in good else F), (variable, text)
            assert f"{variable}={text}" in finding.found
            if text in wrong:
                assert "the interfaces that are up are lo, eth0, ens3f1, ib0" in finding.found
                assert finding.hint == f"export {variable}=eth0"
    assert network.judge_interface(exact, "eth0", ["lo"]).hint.endswith("=lo")


def test_interfaces_are_told_and_the_variables_judged_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    down = Interface("eth8", False, ("10.0.0.8",))
    bridge = Interface("docker0", True, ("172.17.0.1",))
    monkeypatch.setattr(network, "interfaces", lambda: [LOOPBACK, down, bridge, ETHERNET])
    environ = {"GLOO_SOCKET_IFNAME": "eth8", "NCCL_SOCKET_IFNAME": "docker"}
    found = list(network.check_interfaces(situation(environ)))
    assert [each.state for each in found] == [OK, F, OK]
    assert found[0].found == "eth7 (10.0.0.7, fd00::7)"
    assert network.interfaces_out() == [ETHERNET]
    assert network.use_interface() == USE_ETHERNET


def test_the_way_out_is_the_one_of_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """If that leads to other machines, as one to containers does not."""
    bridge, other = Interface("docker0", True, ("172.17.0.1",)), Interface("eth8", True, ("10.0.0.8",))
    monkeypatch.setattr(network, "interfaces", lambda: [LOOPBACK, bridge, ETHERNET, other])
    for address, expected in (
        ("10.0.0.8", other),
        ("fd00::7", ETHERNET),
        ("172.17.0.1", ETHERNET),
        ("", ETHERNET),
    ):
        monkeypatch.setattr(network, "_address_of_default_route", lambda address=address: address)
        assert network.interfaces_out()[0] == expected


def test_interfaces_that_lead_nowhere_or_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: [LOOPBACK])
    assert [each.state for each in network.check_interfaces(situation())] == [W]
    assert (network.interfaces_out(), network.use_interface()) == ([], None)
    found = network.judge_addresses("me", ["127.0.1.1"], 0.0, 2)
    assert (found.fix, found.hint[:34]) == (None, "give me its address in the hosts f")

    def refuse() -> list[Interface]:
        raise OSError("no rights")

    monkeypatch.setattr(network, "interfaces", refuse)
    [found] = network.check_interfaces(situation())
    assert (found.state, found.found) == (U, "the system does not tell them: no rights")
    assert network.interfaces_out() == []


def test_address_families() -> None:
    assert is_own_address("127.0.0.1")
    assert not is_own_address("203.0.113.7")
    [found] = network.check_families(situation())
    assert found.found.startswith("IPv4")


# The endpoint's name -------------------------------------------------------------------------------------


def test_names_that_lead_each_machine_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, addresses, is_here, warns in (
        ("me", ["127.0.1.1", "::1"], True, True),
        ("me", ["127.0.1.1", "10.0.0.7"], True, False),
        ("localhost", ["127.0.0.1"], True, False),
        ("127.0.0.1", ["127.0.0.1"], True, False),
        ("other", ["127.0.1.1"], False, False),
        ("other", ["fe80::1%eth0"], True, False),
    ):
        monkeypatch.setattr(stores, "resolve", lambda _, addresses=addresses: (addresses, 0.0))
        monkeypatch.setattr(stores, "is_this_machine", lambda _, is_here=is_here: is_here)
        found = stores.check_endpoint(situation(endpoint=Endpoint(host, 1)))
        assert [each.state for each in found] == [OK, W][: 1 + warns], host


def test_what_the_name_of_the_endpoint_means() -> None:
    for host, text in {
        "127.0.0.1": r"127\.0\.0\.1 is this machine",
        "192.0.2.1": r"192\.0\.2\.1 is another machine",
        "localhost": r"localhost is .*127\.0\.0\.1.*, found in \d+ ms, and this machine",
    }.items():
        [found] = stores.check_endpoint(situation(endpoint=Endpoint(host, 1)))
        assert found.state is OK
        assert re.fullmatch(text, found.found), found
    assert list(stores.check_endpoint(situation())) == []


def test_an_endpoint_whose_name_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> tuple[list[str], float]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(stores, "resolve", fail)
    address = "use its address, or add node-b to the hosts file"
    for host, hint in (("node.local", "mDNS names need a resolver"), ("node-b", address)):
        [found] = stores.check_endpoint(situation(endpoint=Endpoint(host, 1)))
        assert (found.state, found.found) == (F, f"{host} does not resolve here (Name or service not known)")
        assert found.hint.startswith(hint)


# Proxies -------------------------------------------------------------------------------------------------


def test_hosts_that_are_excepted_from_proxies() -> None:
    for host, exceptions, excepted in (
        ("node-a", "", False),
        ("node-a", "x, node-a ,y", True),
        ("node-a.cluster", ".cluster", True),
        ("node-a.cluster", "*.cluster", True),
        ("node-a.cluster", "cluster", True),
        ("node-acluster", "cluster", False),
        ("node-a", "*", True),
        ("node-a", "node", False),
        ("node-a", ",,", False),
    ):
        environ = {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": exceptions}
        [found] = network.judge_proxies(situation(environ, Endpoint(host, 1)))
        assert found.state is (OK if excepted else W), exceptions
        assert found.found.startswith("https_proxy is set")
        assert (f"{host} over HTTP" in found.found) != excepted


def test_a_proxy_without_an_endpoint_is_only_told() -> None:
    assert list(network.judge_proxies(situation({"http_proxy": ""}))) == []
    [found] = network.judge_proxies(situation({"http_proxy": "p", "ALL_PROXY": "p"}))
    assert told(found) == (OK, "http_proxy, all_proxy are set: stores and gloo do not use it", "")


def test_sidecars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda _: False)
    for environ, ports, signs in (
        ({}, {15_006, 15_001}, {"Istio": "port 15001, port 15006"}),
        ({"LINKERD_X": "1"}, {15_090}, {"Istio": "port 15090", "Linkerd": "the variable LINKERD_X"}),
        ({"PATH": "1"}, {80}, {}),
    ):
        found = list(network.judge_meshes(environ, ports))
        for finding, (name, sign) in zip(found, signs.items(), strict=True):
            assert finding.state is W
            assert f"a sidecar of {name} seems to be here ({sign})" in finding.found
            assert "inject" in finding.hint
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/etc/istio/proxy")
    [finding] = network.judge_meshes({}, set())
    assert "(/etc/istio/proxy)" in finding.found


# Packages ------------------------------------------------------------------------------------------------


def test_packages_and_a_torch_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.13.0", "numpy": "2"}
    monkeypatch.setattr(machine, "installed", lambda name: there.get(name, ABSENT))
    [found] = machine.check_packages(situation())
    assert found.found.endswith(", torch 2.13.0, numpy 2")
    del there["numpy"]
    [found] = machine.check_packages(situation())
    assert (found.state, found.hint) == (W, "pip install numpy")
    there.clear()
    [found] = machine.check_packages(situation())
    assert (found.state, found.found) == (OK, f"rallypoint {rallypoint.__version__} ({in_use()})")


def test_an_event_loop_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    [found] = machine.check_event_loop(situation())
    assert found.state is OK
    monkeypatch.setattr(machine, "LOOP_PACKAGE", "no_such_loop")
    [found] = machine.check_event_loop(situation())
    assert (found.state, found.hint) == (W, "pip install no_such_loop")
    assert "No module named 'no_such_loop'" in found.found
    for system, is_told in (("linux", False), ("win32", True)):
        monkeypatch.setattr(sys, "platform", system)
        [found] = machine.check_event_loop(situation())
        assert ("refuses the 501st client" in found.found) is is_told
