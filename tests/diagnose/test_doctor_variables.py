"""What the doctor thinks of variables: every rule of them by an example, and commands that can be pasted."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.diagnose.doctor import situation as variables
from rallypoint.diagnose.doctor.exchange import by_launcher
from rallypoint.diagnose.doctor.machine import check_backlog, check_open_files
from rallypoint.diagnose.doctor.situation import Situation, endpoint_of, number_in
from rallypoint.diagnose.findings import Fix, State, ok, set_variable, unset_variable
from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import Endpoint


@pytest.fixture(autouse=True)
def _linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine happens to have says nothing about the rules."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(variables, "client_ports", lambda: (32_768, 60_999))


def situation(environ: Mapping[str, str] | None = None) -> Situation:
    return Situation(environ or {}, None, Path())


# The shell -----------------------------------------------------------------------------------------------


def test_commands_are_in_the_words_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    posix = ["export A=1", "unset A B", "export GLOO=eth0"]
    powershell = ['$env:A = "1"', "Remove-Item Env:A, Env:B", '$env:GLOO = "eth0"']
    for platform, commands in {"linux": posix, "darwin": posix, "win32": powershell}.items():
        monkeypatch.setattr(sys, "platform", platform)
        assert [
            set_variable("A", "1"),
            unset_variable("A", "B"),
            Fix("env", "GLOO", "eth0").command,
            Fix("run", "rdzv_endpoint", "a:1").command,
        ] == [*commands, "rallypoint run --rdzv-endpoint=a:1 ..."]


# Variables -----------------------------------------------------------------------------------------------

ONE_MACHINE, TWO_MACHINES = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, {"GROUP_WORLD_SIZE": "2"}
RANK = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}

NONE = "none that concerns a job is set: the launcher sets them"


def test_sane_variables_are_told_in_one_finding() -> None:
    for environ, text in (
        ({}, NONE),
        ({"PATH": "/bin", "HOME": "/root"}, NONE),
        (RANK, "MASTER_ADDR=node-a, MASTER_PORT=29500, RANK=1, WORLD_SIZE=4"),
        ({"PET_NNODES": "2", "TORCHELASTIC_RUN_ID": "x", "LANG": "C"}, "PET_NNODES=2, TORCHELASTIC_RUN_ID=x"),
        ({"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT=1"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=0, LOCAL_WORLD_SIZE=1"),
        ({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, "GROUP_RANK=0, GROUP_WORLD_SIZE=1"),
        ({"MASTER_ADDR": "::1", **ONE_MACHINE}, "LOCAL_WORLD_SIZE=8, MASTER_ADDR=::1, WORLD_SIZE=8"),
    ):
        assert list(variables.check_variables(situation(environ))) == [ok(text)]
    for name, texts in {
        "MASTER_ADDR": ("fd00::1", "localhost"),
        "MASTER_PORT": ("1024", "32767", "61000", "65535", " 29500 "),
        "USE_LIBUV": ("", "1"),
        "RALLYPOINT_PATCH": ("always",),
        "RALLYPOINT_CLIENT": ("python",),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": ("1",),
    }.items():
        for text in texts:
            assert list(variables.check_variables(situation({name: text}))) == [ok(f"{name}={text}")]


def test_a_switch_that_launchers_do_not_obey_is_called_so() -> None:
    noted, told = variables.check_variables(situation({"USE_LIBUV": "0"}))
    assert (noted.state, told) == (State.NOTE, ok("USE_LIBUV=0"))
    assert "the stores that torchrun and accelerate make for their rendezvous do not" in noted.found


def test_a_rank_beyond_the_world_may_be_right_and_the_world_too_small() -> None:
    (found,) = variables.check_variables(situation({**RANK, "RANK": "5", "WORLD_SIZE": "2"}))
    assert found.state is State.FAILURE
    assert found.hint.startswith("WORLD_SIZE is the number of ranks on all machines together")


OTHER_PORT = "export MASTER_PORT=29500"
F, W = State.FAILURE, State.WARNING

WRONG: list[tuple[dict[str, str], State, str, str]] = [
    *(
        ({"MASTER_ADDR": address}, F, f"MASTER_ADDR is {found}", hint)
        for address, found, hint in (
            ("", "set, but empty", "unset MASTER_ADDR"),
            ("  ", "set, but empty", "unset MASTER_ADDR"),
            ("[fd00::1]", "[fd00::1]: torch takes the brackets for a part", "export MASTER_ADDR=fd00::1"),
            (
                "tcp://node-a:29500",
                "tcp://node-a:29500, which is a URL and no host",
                "export MASTER_ADDR=node-a",
            ),
            ("node-a/x", "node-a/x, which is a URL and no host", "export MASTER_ADDR=node-a"),
            (" node-a", "' node-a', with spaces around it", "export MASTER_ADDR=node-a"),
            ("a:1", "a:1: a port belongs into MASTER_PORT", "export MASTER_ADDR=a; export MASTER_PORT=1"),
        )
    ),
    *(
        ({"MASTER_ADDR": each, **more}, state, "which leads every machine to itself", hint)
        for each in ("0.0.0.0", "::")
        for more, state, hint in (
            ({}, W, "export MASTER_ADDR=127.0.0.1"),
            (ONE_MACHINE, W, "export MASTER_ADDR=127.0.0.1"),
            (TWO_MACHINES, F, "set MASTER_ADDR to the first machine's address"),
        )
    ),
    *(
        (
            {"MASTER_ADDR": each, **TWO_MACHINES},
            F,
            f"MASTER_ADDR is {each}, which each of the 2 machines",
            "hostname",
        )
        for each in ("127.1.2.3", "LocalHost", "::1")
    ),
    *(
        ({"MASTER_PORT": each}, F, f"MASTER_PORT is {each!r}: ports are numbers from 1 to 65535", OTHER_PORT)
        for each in ("", "http", "65536", "-1", "29500x", "9" * 5000, "²")
    ),
    ({"MASTER_PORT": "0"}, W, "every process would take a free port of its own", OTHER_PORT),
    ({"MASTER_PORT": "1"}, W, "MASTER_PORT is 1: ports below 1024 are for administrators", OTHER_PORT),
    ({"MASTER_PORT": "1023"}, W, "ports below 1024 are for administrators", OTHER_PORT),
    ({"MASTER_PORT": "32768"}, W, "of the range 32768 to 60999 that the system gives to clients", OTHER_PORT),
    ({"MASTER_PORT": "60999"}, W, "any program may hold it by chance", OTHER_PORT),
    *(
        (
            {**(RANK if name == "RANK" else {}), name: text},
            F,
            f"{name} is {text!r}: it has to be a number from {least} on",
            f"unset {name}",
        )
        for name, text, least in (
            *(("RANK", "x", 0), ("WORLD_SIZE", "0", 1), ("LOCAL_RANK", "-1", 0)),
            *(("LOCAL_WORLD_SIZE", "0", 1), ("GROUP_RANK", "-1", 0), ("GROUP_WORLD_SIZE", "0", 1)),
        )
    ),
    *(
        (
            {**(RANK if not group else {}), rank: "4", size: "4"},
            F,
            f"{rank} is 4, but {size} is 4: ranks go from 0 to 3",
            f"unset {rank} {size}",
        )
        for group in ("", "LOCAL_", "GROUP_")
        for rank, size in [(f"{group}RANK", f"{group}WORLD_SIZE")]
    ),
    ({**RANK, "LOCAL_RANK": "2"}, F, "LOCAL_RANK is 2, but RANK is only 1", "unset LOCAL_RANK RANK"),
    (
        {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "4"},
        F,
        "LOCAL_WORLD_SIZE is 8, but WORLD_SIZE is only 4",
        "unset LOCAL_WORLD_SIZE WORLD_SIZE",
    ),
    ({"RALLYPOINT_PATCH": "maybe"}, F, "RALLYPOINT_PATCH", "auto"),
    ({"RALLYPOINT_CLIENT": "perl"}, F, "RALLYPOINT_CLIENT", "python"),
    ({"USE_LIBUV": "perhaps"}, W, "the variable USE_LIBUV is 'perhaps', which is no switch", "0, 1, true"),
    ({"RALLYPOINT_PATCH": "never"}, W, "Rallypoint may not help", "unset RALLYPOINT_PATCH"),
    ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, W, "is not loaded", "unset TORCH_DEVICE_BACKEND_AUTOLOAD"),
    (
        {"NCCL_BLOCKING_WAIT": "1"},
        W,
        "NCCL_BLOCKING_WAIT is an old name",
        "export TORCH_NCCL_BLOCKING_WAIT=1; unset NCCL_BLOCKING_WAIT",
    ),
    (
        {"RANK": "1"},
        F,
        "RANK is 1, but WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not set",
        "rallypoint run",
    ),
]


@pytest.mark.parametrize(("environ", "state", "found", "hint"), WRONG)
def test_variables_that_are_wrong_have_one_finding_each(
    environ: dict[str, str], state: State, found: str, hint: str
) -> None:
    [finding] = variables.check_variables(Situation(environ, endpoint_of(environ), Path()))
    assert finding.state is state
    assert found in finding.found
    assert hint in finding.hint


def test_each_variable_that_is_wrong_is_told() -> None:
    found = variables.check_variables(
        situation({"MASTER_ADDR": "", "MASTER_PORT": "x", "USE_LIBUV": "x", "WORLD_SIZE": "x"})
    )
    assert [each.found.split()[0] for each in found] == ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "the"]


def test_the_hint_names_the_host_of_a_url_and_of_brackets() -> None:
    for address, hint in {
        "[fd00::1]:29400": "export MASTER_ADDR=fd00::1; export MASTER_PORT=29400",
        "tcp://[fd00::1]:29400": "export MASTER_ADDR=fd00::1",
        "file:///x": "export MASTER_ADDR=HOST",
    }.items():
        [found] = variables.check_variables(situation({"MASTER_ADDR": address}))
        assert found.hint == hint


# What the user has said ----------------------------------------------------------------------------------


def test_the_endpoint_of_the_variables() -> None:
    for address, port, expected in (
        (None, "1", None),
        (" ", None, None),
        ("a", None, Endpoint("a", 29500)),
        (" a ", " 65535\n", Endpoint("a", 65535)),
        ("[::1]", "1", Endpoint("::1", 1)),
        *(("a", text, None) for text in ("", "0", "65536", "x")),
    ):
        environ = {"MASTER_ADDR": address, "MASTER_PORT": port}
        assert endpoint_of({name: text for name, text in environ.items() if text is not None}) == expected


def test_a_number_in_a_variable() -> None:
    """Python itself reads more as numbers than launchers do, and refuses those of thousands of digits."""
    for text, number in (("4", 4), (" 4\t", 4), ("-3", -3), ("007", 7), ("9" * 18, 10**18 - 1)):
        assert number_in({"A": text}, "A") == number
    for text in ("", " ", "x", "²", "4.0", "+4", "1_000", "0x4", "- 4", "9" * 19, "9" * 5000):
        assert number_in({"A": text}, "A") is None
    assert number_in({}, "A") is None


NUMBERS = st.sampled_from(["-1", "0", "1", "2", " 3 ", "9" * 18, "-" + "9" * 18, "9" * 5000, "x", ""])
ABSURD = st.fixed_dictionaries({}, optional=dict.fromkeys((*variables._RANK, "MASTER_PORT"), NUMBERS))
TEXTS = st.dictionaries(
    st.sampled_from([*variables._SHOWN, *variables._RENAMED, "PET_NNODES", "HOME"]), st.text(max_size=12)
)


@settings(max_examples=50)
@given(ABSURD, TEXTS)
def test_any_variables_come_to_something(numbers: dict[str, str], texts: dict[str, str]) -> None:
    environ = {**texts, **numbers}
    here = Situation(environ, endpoint_of(environ), Path())
    assert here.machines >= 1
    assert here.world_size is None or 0 < here.world_size <= 10_000_000
    found = list(variables.check_variables(here))
    assert found
    assert all(each.found for each in found)
    assert [each.state for each in found] == [State.OK] or all(each.hint for each in found), (
        "what is wrong has a remedy"
    )
    assert all(each.found for check in (check_open_files, check_backlog) for each in check(here))


@given(ABSURD)
def test_a_launcher_that_says_absurd_numbers_is_refused(environ: dict[str, str]) -> None:
    """Else machines would wait for some that cannot be."""
    try:
        job = by_launcher({**environ, "MASTER_ADDR": "node-a"})
    except UsageError:
        return
    assert 0 <= job.number < job.count <= 10_000_000


def test_how_many_machines_are_meant() -> None:
    for host, machines in {
        "127.0.0.1": 1,
        "localhost": 1,
        "0.0.0.0": 1,
        "::": 1,
        "node-a": 2,
        "10.0.0.1": 2,
    }.items():
        assert Situation({}, Endpoint(host, 29500), Path()).machines == machines
    assert Situation({"GROUP_WORLD_SIZE": "5"}, Endpoint("node-a", 29500), Path()).machines == 5
    for groups, world, local, machines in (
        *(("", "", "", 1), ("5", "", "", 5), ("-5", "", "", 1)),
        *(("", "16", "8", 2), ("", "16", "", 1), ("", "16", "0", 1)),
    ):
        environ = {"GROUP_WORLD_SIZE": groups, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}
        assert situation({name: text for name, text in environ.items() if text}).machines == machines


def test_the_world_size_if_it_is_one() -> None:
    for text, size in {" 4 ": 4, "10000000": 10_000_000, "10000001": None, "0": None, "x": None}.items():
        assert situation({"WORLD_SIZE": text}).world_size == size
