"""`rallypoint doctor` as a command: what it prints, writes and leaves behind, also on half a system."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from command_line import invoke
from jobs import free_port, job
from namespaces import Machine, two_machines
from processes import end
from rallypoint.cli import doctor as examining
from rallypoint.cli.findings import print_matrix
from rallypoint.cli.main import main
from rallypoint.client.base import PrefixStore
from rallypoint.client.tcp import TCPStore
from rallypoint.diagnose.doctor import exchange
from rallypoint.diagnose.doctor.checks import CHECKS
from rallypoint.diagnose.doctor.exchange import Gathered, visit
from rallypoint.diagnose.doctor.network import interfaces_out
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, Fix, State
from rallypoint.errors import ConnectionLostError, RallypointError, UsageError
from rallypoint.launch.endpoint import Endpoint, parse_endpoint
from rallypoint.launch.environment import put_on_path, without_rank
from raw import SECONDS, until
from test_doctor_judging import gathering, way

OK, N, W, F, U = State.OK, State.NOTE, State.WARNING, State.FAILURE, State.UNKNOWN
Said = tuple[str | int | None, str, str]
DOCTOR = (sys.executable, "-m", "rallypoint", "doctor")

# torch takes seconds, and so do look-ups where the resolver does not answer: for tests of something else.
QUICK = """
import socket, sys
sys.modules["torch"] = None
socket.getnameinfo = lambda *_: ("localhost", "9")
"""

BARE = """
import socket, sys
sys.modules["torch"] = None

class Socket(socket.socket):
    def __init__(self, *_, **__):
        raise PermissionError(1, "Operation not permitted")

def refuse(*_, **__):
    raise PermissionError(1, "Operation not permitted")

socket.socket = Socket
socket.getaddrinfo = socket.getnameinfo = refuse
"""


def environment(folder: Path, customisation: str = "", **more: str) -> dict[str, str]:
    """Of a shell that knows of no job, with a program that every interpreter runs first."""
    environ = {**without_rank(os.environ), "OMP_NUM_THREADS": "1", **more}
    if not customisation:
        return environ
    place = folder / "customisation"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(customisation)
    return put_on_path(environ, place)


def doctor(
    *words: str, environ: Mapping[str, str], folder: Path, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, *DOCTOR, *words],
        capture_output=True,
        text=True,
        timeout=SECONDS * 2,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
    )


def by_name(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for each in document["findings"]:
        found.setdefault(each["name"], []).append(each)
    return found


def states(document: dict[str, Any]) -> set[str]:
    return {each["state"] for each in document["findings"]}


# This machine ----------------------------------------------------------------------------------------------


def test_this_machine_is_examined(tmp_path: Path) -> None:
    port = free_port()
    environ = environment(tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    done = doctor("--json", "--folder", str(tmp_path), environ=environ, folder=tmp_path)
    document = json.loads(done.stdout)
    found = by_name(document)
    of_torch = {"libuv", "gloo", "devices", "torchrun-plug-in"}
    asked = {check.name for check in CHECKS} - {"interface", "engine"} | of_torch
    assert set(found) - {"known-defects", "nccl"} >= asked
    assert done.returncode == (1 if "failure" in states(document) else 0), done.stdout
    assert "unknown" not in states(document), done.stdout
    assert all(each["hint"] for each in document["findings"] if each["state"] == "failure")
    assert str(port) in found["port"][0]["found"]
    assert found["store"][0]["found"] == f"nothing listens at 127.0.0.1:{port} yet"
    assert str(tmp_path.resolve()) in found["file-init"][0]["found"]
    outlook = {each["name"]: each["prospect"] for each in document["outlook"]}
    assert list(outlook) == ["plain (env://, tcp://)", "torchrun", "accelerate", "file init", "gloo", "NCCL"]
    assert list(outlook.values())[:5] == ["yes"] * 5  # NCCL needs a GPU
    assert re.search(r"^rallypoint: .* \(\d+ findings in [\d.]+ s\)$", done.stderr, re.MULTILINE), done.stderr
    assert "Traceback" not in done.stderr
    order = [check.name for check in CHECKS]
    names = [each["name"] for each in document["findings"] if each["name"] in order]
    assert names == sorted(names, key=order.index), "in the order of the catalogue, whenever they came"


def without_proc() -> Sequence[str]:
    """What stands in front of a command for it to have no /proc; nothing where that is not allowed."""
    hide = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
    if shutil.which("unshare") is None or subprocess.run([*hide, "true"], capture_output=True).returncode:
        return ()
    return hide


@pytest.mark.parametrize(
    "proc",
    [
        pytest.param(True, id="with /proc"),
        pytest.param(False, id="without /proc", marks=pytest.mark.slow),
    ],
)
def test_without_torch_and_without_sockets_it_still_says_what_it_can(proc: bool, tmp_path: Path) -> None:
    prefix = () if proc else without_proc()
    if not proc and not prefix:
        pytest.skip("no mount namespace can be had here")
    environ = environment(tmp_path, BARE, MASTER_ADDR="127.0.0.1")
    asked_for = ("--endpoint", "127.0.0.1:29500") if proc else ()  # then a visit is tried, too
    done = doctor("--json", *asked_for, environ=environ, folder=tmp_path, prefix=prefix)
    assert "Traceback" not in done.stderr, done.stderr
    document = json.loads(done.stdout)
    found = by_name(document)
    assert done.returncode == 1
    assert found["torch"][0]["found"].startswith("not installed for")
    assert found["loopback"][0]["state"] == "failure"
    assert "Operation not permitted" in found["loopback"][0]["found"]
    assert found["address-families"][0]["state"] == "failure"
    assert found["store"][0]["state"] == "failure"
    assert found["file-init"][0]["state"] == "ok", "files need no sockets"
    assert {each["prospect"] for each in document["outlook"]} == {"no"}
    assert ("unknown" in {each["state"] for each in found["backlog"]}) != proc


# Usage -----------------------------------------------------------------------------------------------------


def said_by_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Said:
    """How the command ends in this process, and what it says."""
    monkeypatch.setattr(sys, "argv", ["rallypoint", "doctor", *words])
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught:
        main()
    said = capsys.readouterr()
    return caught.value.code, said.out, said.err


def test_wrong_usage_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    apart = "--listen, --all, --health and --fix are for different things"
    for line, message in {
        "--endpoint a,b": "'a,b' is no endpoint",
        "--endpoint node:70000": "is no endpoint",
        "--endpoint node:0": "names no port",
        "--endpoint=": "names no port",
        "--folder /no/such/folder": "/no/such/folder is not a folder",
        "--listen --fix": apart,
        "--listen --all": apart,
        "--all --fix": apart,
        "--all": "--all is for a process that a launcher has started",
        "--listen --endpoint 192.0.2.1:29500": "192.0.2.1 is not this machine",
    }.items():
        code, out, err = said_by_main(monkeypatch, capsys, *line.split())
        assert (code, out) == (2, ""), line
        assert message in err
        assert "hint: " in err


def test_only_an_endpoint_that_was_asked_for_is_visited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Endpoint | None, dict[str, bool]]] = []

    def examine(situation: Situation, _: object, **said: bool) -> bool:
        asked.append((situation.endpoint, said))
        return True

    monkeypatch.setenv("MASTER_ADDR", "by-variable")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr(examining, "examine", examine)
    for words in ((), ("--endpoint", "by-option:1")):
        assert said_by_main(monkeypatch, capsys, *words) == (0, "", "")
    assert asked == [
        (Endpoint("by-variable", 29500), {"visits": False, "as_json": False}),
        (Endpoint("by-option", 1), {"visits": True, "as_json": False}),
    ]


# What is printed -------------------------------------------------------------------------------------------

USE, USE_ETHERNET = "export GLOO_SOCKET_IFNAME=eth7", Fix("env", "GLOO_SOCKET_IFNAME", "eth7")
CLIENT = "rallypoint run --client=python"
WRONG = [
    Finding("python", OK, "3.11"),
    Finding("host-name", W, "me is 127.0.0.1", USE, USE_ETHERNET),
    Finding("interfaces", U, "the system\n  does not tell them"),
    Finding("known-defects", N, "it warns", "ignore it"),
    Finding("libuv", F, "it says \x1b[31mred", CLIENT, Fix("run", "client", "python")),
    Finding("gloo", F, "it fails", USE, USE_ETHERNET),
]


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Finding]:
    """What the checks will have found, to be changed at will; in a folder of its own."""
    found = list(WRONG)
    monkeypatch.setattr(examining, "_run_checks", lambda *_, **__: list(found))
    monkeypatch.chdir(tmp_path)
    return found


HERE = Situation({}, None, Path())


def test_a_report_for_people(findings: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    assert not examining.examine(HERE, visits=False, as_json=False)
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[:7] == [
        "ok       python         3.11",
        "warning  host-name      me is 127.0.0.1",
        "                        hint: export GLOO_SOCKET_IFNAME=eth7",
        "unknown  interfaces     the system does not tell them",
        "note     known-defects  it warns",
        "                        hint: ignore it",
        "failure  libuv          it says \\x1b[31mred",  # a terminal obeys nothing of it
    ]
    assert "What will work here:" in lines
    assert said.err.startswith("rallypoint: 2 failed, 1 with a warning, 1 not known (6 findings in ")


def test_only_failures_make_it_fail(findings: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    for state in State:
        findings[:] = [Finding("x", state, "y")]
        assert examining.examine(HERE, visits=False, as_json=True) == (state is not F)
        assert ("all is well" in capsys.readouterr().err) == (state in (OK, N))


def test_long_texts_are_wrapped_and_commands_kept_whole(
    findings: list[Finding], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    command = "export LONG=one; export LONGER=" + "x" * 70
    findings[:] = [Finding("name", W, "word " * 30, command)]
    examining.examine(HERE, visits=False, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert f"{'':15}hint: {command}" in lines, "on one line, to be pasted"
    assert all(len(line) <= 60 for line in lines[:4])
    assert lines[1].startswith(" " * 15 + "word")


def test_a_matrix_for_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    print_matrix(gathering(2))
    assert capsys.readouterr().out.splitlines()[2:] == [
        "          0       1",
        "  0       -  200 us",
        "  1  200 us       -",
    ]
    print_matrix(gathering(16))
    assert len(capsys.readouterr().out.splitlines()) == 2 + 17
    print_matrix(gathering(17))
    assert capsys.readouterr().out == ""


def test_a_doctor_that_goes_away_costs_nobody_the_own_findings(
    findings: list[Finding], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_away(*_: object) -> None:
        raise ConnectionLostError("the connection was lost", hint="look at its log")

    findings[:] = [Finding("python", OK, "3.11")]
    monkeypatch.setattr(examining, "visit", go_away)
    place = Situation({}, Endpoint("a", 1), Path())
    lost = "the doctor at a:1 went away: the connection was lost"
    assert not examining.examine(place, visits=True, as_json=True)
    found = by_name(json.loads(capsys.readouterr().out))
    assert found["python"][0]["state"] == "ok"
    assert (found["machines"][0]["state"], found["machines"][0]["found"]) == ("failure", lost)
    assert not examining.examine(place, visits=True, as_json=False)
    said = capsys.readouterr()
    assert said.out.startswith(
        f"ok       python    3.11\nfailure  machines  {lost}\n{'':19}hint: look at its log\n"
    )
    assert said.err.startswith("rallypoint: 1 failed (2 findings")
    assert examining.examine(place, visits=False, as_json=True), (
        "where nobody asked for it, nobody is visited"
    )


def test_a_listening_doctor_fails_if_any_visit_showed_a_way_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, broken = gathering(2), gathering(2, replace(way(0, 1), error="no answer"))
    gone = replace(gathering(1), count=2)
    monkeypatch.setattr(examining, "open_practice", lambda _: nullcontext(SimpleNamespace(port=7)))
    for visits, expected in (([], True), ([good], True), ([good, broken, good], False), ([gone], False)):

        def receive(_: object, tell: Callable[[Gathered], None], visits: list[Gathered] = visits) -> None:
            for each in visits:
                tell(each)
            raise KeyboardInterrupt

        monkeypatch.setattr(examining, "receive_visitors", receive)
        assert examining.receive(Endpoint("a", 7), as_json=False) == expected
        said = capsys.readouterr()
        assert said.out.count("node-1 (1) came\n") == len(visits) - visits.count(gone)
        assert said.out.count("somebody came, and left\n") == visits.count(gone)
        assert "rallypoint doctor --endpoint a:7" in said.err


def be_a_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, per_machine: int) -> None:
    job = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": per_machine, "MASTER_ADDR": "a"}
    for name, text in {**job, "LOCAL_RANK": rank % per_machine}.items():
        monkeypatch.setenv(name, str(text))
    for name in ("GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_of_all_machines_the_first_tells_and_fails(
    findings: list[Finding], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks 0 and 1 are of the first machine, 2 of the second: one of them fails, not all."""
    findings[:] = [Finding("python", OK, "3.11"), Finding("clock", W, "it is late")]
    broken = gathering(2, replace(way(0, 1), error="no answer"))
    everything = replace(broken, findings={0: tuple(findings), 1: (Finding("python", OK, "3.11"),)})
    monkeypatch.setattr(examining, "attend_job", lambda *_: everything)
    for rank in range(3):
        be_a_rank(monkeypatch, rank, 4, 2)
        assert examining.examine_everyone(Path(), as_json=False) == (rank != 0)
        said = capsys.readouterr().out
        for words in ("on node-0 (0)", "does not reach", "who reaches whom"):
            assert (words in said) == (rank == 0)
        assert said.count("nothing is wrong\n") == (rank == 0), "of a machine without fault, one line"
        assert "python  3.11" not in said


def test_what_is_so_on_every_machine_is_told_once(
    findings: list[Finding], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_a_rank(monkeypatch, 0, 3, 1)
    same = [
        Finding("clock", W, "it is late", "wait"),
        Finding("python", OK, "3.11"),
        Finding("known-defects", N, "it warns"),
    ]
    own = Finding("backlog", W, "128 clients")
    of_each = {0: tuple(same), 1: (*same, own), 2: tuple(replace(each, seconds=3.0) for each in same)}
    monkeypatch.setattr(examining, "attend_job", lambda *_: replace(gathering(3), findings=of_each))
    assert examining.examine_everyone(Path(), as_json=False)
    said = capsys.readouterr().out
    assert said.startswith(
        "\non every machine\n"
        "warning  clock  it is late\n"
        "                hint: wait\n"
        "\non node-0 (0)\nok       machine  nothing else\n"
        "\non node-1 (1)\nwarning  backlog  128 clients\n"
        "\non node-2 (2)\nok       machine  nothing else\n"
        "\nbetween the machines\n"
    )
    monkeypatch.setattr(examining, "attend_job", lambda *_: replace(gathering(1), findings={0: tuple(same)}))
    assert examining.examine_everyone(Path(), as_json=False)
    said = capsys.readouterr().out
    assert "on every machine" not in said, "there is one"
    assert "on node-0 (0)\nwarning  clock" in said


# Mending ---------------------------------------------------------------------------------------------------

MENDED = """# by rallypoint doctor --fix
[env]
GLOO_SOCKET_IFNAME = "eth7"

[run]
client = "python"
"""


def test_what_mends_something_is_shown_then_written(
    findings: list[Finding], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert not examining.mend(HERE, as_json=False), "what was wrong was wrong"
    said = capsys.readouterr()
    path = tmp_path.resolve() / "rallypoint.toml"
    assert path.read_text() == MENDED
    assert f"{path} would be:" in said.out
    assert "    [env]\n" in said.out
    assert "3.11" not in said.out, "what is well is not of interest here"
    assert f"rallypoint: wrote {path}; to undo it, delete {path}" in said.err
    examining.mend(HERE, as_json=False)
    said = capsys.readouterr()
    assert "Nothing to write: rallypoint.toml has it all already." in said.out
    assert "wrote" not in said.err
    assert [each.name for each in tmp_path.iterdir()] == ["rallypoint.toml"]


def test_mending_as_json(findings: list[Finding], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path.resolve() / "rallypoint.toml"
    tables = {"env": {"GLOO_SOCKET_IFNAME": "eth7"}, "run": {"client": "python"}}
    for written in ({"file": str(path), "settings": tables, "undo": f"delete {path}"}, None):
        examining.mend(HERE, as_json=True)
        assert json.loads(capsys.readouterr().out)["written"] == written
        assert path.read_text() == MENDED


def test_a_variable_that_is_set_is_not_written(
    findings: list[Finding], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It goes before the file, so that would change nothing; the hint says what does."""
    fixable = [each for each in findings if each.fix]
    findings[:] = [Finding("x", F, "y", "do it yourself")]
    assert not examining.mend(HERE, as_json=False)
    assert "Nothing to write: none of this is for rallypoint.toml to mend." in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    findings[:] = fixable
    chosen = Situation({"GLOO_SOCKET_IFNAME": "eth0", "client": "x"}, None, Path())
    examining.mend(chosen, as_json=False)
    assert "hint: export GLOO_SOCKET_IFNAME=eth7" in capsys.readouterr().out
    assert (tmp_path / "rallypoint.toml").read_text().endswith('--fix\n[run]\nclient = "python"\n')


def test_on_a_terminal_it_asks_first(
    findings: list[Finding],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for answer in ("", "n\n", "\n"):  # at the end of the input, nobody agrees
        monkeypatch.setattr(sys.stdin, "readline", lambda answer=answer: answer)
        examining.mend(HERE, as_json=False)
        assert (tmp_path / "rallypoint.toml").exists() == (answer == "\n")
        assert ("nothing was written" in capsys.readouterr().err) != (answer == "\n")


def test_a_file_that_others_may_write_is_not_replaced(
    findings: list[Finding], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "rallypoint.toml"
    path.write_text("[run]\nclient = 'torch'\n")
    path.chmod(0o666)
    with pytest.raises(RallypointError, match=r"rallypoint\.toml cannot be written: File exists"):
        examining.mend(HERE, as_json=False)
    assert path.read_text() == "[run]\nclient = 'torch'\n"
    assert "rallypoint.toml is not used: everybody may write" in capsys.readouterr().err


def test_a_file_that_is_written_where_others_may_write_says_that_it_does_not_count(
    findings: list[Finding], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    examining.mend(HERE, as_json=False)
    wrote, warning = capsys.readouterr().err.splitlines()[:2]
    assert wrote.startswith("rallypoint: wrote ")
    assert f"rallypoint.toml is not used: everybody may write {tmp_path.resolve()};" in warning


def test_what_is_written_counts_for_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()  # of the range for clients
    environ = environment(tmp_path, QUICK, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    done = doctor("--fix", environ=environ, folder=tmp_path)
    assert "rallypoint: 1 failed" in done.stderr, "torch, which is hidden"
    assert "rdzv-endpoint = " in done.stdout
    monkeypatch.chdir(tmp_path)
    show = invoke("run", "--show-config", "--json")
    settings = json.loads(show.stdout)
    assert re.fullmatch(r"127\.0\.0\.1:2\d{4}", settings["rdzv_endpoint"]["value"])


def test_a_file_that_is_there_is_not_edited_but_it_is_said_what_belongs_there(
    findings: list[Finding], tmp_path: Path
) -> None:
    for name, text, table in (
        ("pyproject.toml", "[tool.rallypoint.run]\nclient = 'torch'\n", "tool.rallypoint.env"),
        ("rallypoint.toml", "[run]\nclient = 'torch'\nnnodes = 2\n", "env"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match="is not edited") as caught:
            examining.mend(HERE, as_json=False)
        assert caught.value.hint == f'put in: GLOO_SOCKET_IFNAME = "eth7" below [{table}]'
        assert (tmp_path / name).read_text() == text


# Listening -------------------------------------------------------------------------------------------------


needs_network = pytest.mark.skipif(
    not interfaces_out(), reason="loopback is never dialled, and this machine has no other address"
)


@contextmanager
def listening(
    folder: Path, *words: str, prefix: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    """A doctor that listens, and where."""
    process = subprocess.Popen(
        [*prefix, *DOCTOR, "--listen", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environ or environment(folder, QUICK),
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("rallypoint: listening; on another machine: rallypoint doctor --endpoint "), (
            line
        )
        yield process, parse_endpoint(line.split()[-1])
    finally:
        end(process)


@needs_network
def test_a_listening_doctor_tells_of_visitors_and_ends_well_while_one_is_there(tmp_path: Path) -> None:
    """A second visitor comes, and nothing of it but the beginning: no thread leaves a traceback."""
    with listening(tmp_path, "--endpoint", f"127.0.0.1:{free_port()}", "--json") as (process, endpoint):
        found = visit(endpoint, [Finding("a", OK, "b")])
        assert found is not None
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())["machines"]
        assert (told["count"], told["missing"]) == (2, [])
        assert [each["error"] for each in told["ways"]] == ["", ""]
        assert {each["state"] for each in told["between"]} <= {"ok", "warning"}
        with TCPStore(endpoint.host, endpoint.port, timeout=SECONDS) as store:
            practice = PrefixStore(exchange._PREFIX, store)
            number = practice.add(exchange._VISITS, 1)
            practice.queue_push(exchange._VISITORS, str(number))
            practice.wait([f"visit/{number}/card/0"], SECONDS)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert err == "rallypoint: done\n"


@needs_network
def test_a_visitor_tells_of_both_machines_and_its_own(tmp_path: Path) -> None:
    with listening(tmp_path) as (process, endpoint):
        done = doctor("--endpoint", str(endpoint), environ=environment(tmp_path, QUICK), folder=tmp_path)
        assert "machines" in done.stdout, done.stdout
        assert "every machine reaches every other" in done.stdout
        assert "who reaches whom" in done.stdout
        assert "rallypoint: 1 failed" in done.stderr, "torch, which is hidden"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=SECONDS)
    assert "came" in out
    assert "every machine reaches every other" in out
    assert (process.returncode, err) == (0, "rallypoint: done\n")


def test_an_examination_that_is_interrupted_leaves_nothing_behind(tmp_path: Path) -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"

    def ours(word: str = "") -> list[psutil.Process]:
        found = []
        for each in psutil.process_iter():
            try:
                if each.environ().get("TEST_DOCTOR") == mark and word in " ".join(each.cmdline()):
                    found.append(each)
            except psutil.Error:  # it has ended, and may be a zombie
                pass
        return found

    process = subprocess.Popen(
        DOCTOR,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path, TEST_DOCTOR=mark),
    )
    try:
        until(lambda: bool(ours("pytorch.asking")), "torch is being asked")
        process.terminate()
        out, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, out, err) == (128 + signal.SIGTERM, "", "rallypoint: interrupted\n")
        until(lambda: not ours(), "all that it started has ended")
    finally:
        for each in ours():
            each.kill()
        end(process)


# Several machines ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_machines_of_a_job_that_torchrun_began(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    # The agent starts a script; the script becomes the doctor.
    words = ["rallypoint", "doctor", "--all", "--json"]
    script = f"import os, sys; os.execv(sys.executable, [sys.executable, '-m', *{words}])"
    options = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    with job(tmp_path) as running:
        for _ in range(2):
            running.start(script, [*options, "--local-addr=127.0.0.1"])
        codes = running.wait()
        logs = [running.log(number) for number in (0, 1)]
        assert running.processes() == []
    [document] = [
        json.loads(found[0]) for log in logs if (found := re.findall(r"^\{$.*^\}$", log, re.M | re.S))
    ]
    machines = document["machines"]
    assert (machines["count"], machines["missing"]) == (2, [])
    assert [(each["from"], each["to"], each["error"]) for each in machines["ways"]] == [
        (0, 1, ""),
        (1, 0, ""),
    ]
    assert {name for name, found in machines["findings"].items() if found} == {"0", "1"}
    failed = [
        each
        for found in (*machines["findings"].values(), machines["between"])
        for each in found
        if each["state"] == "failure"
    ]
    assert codes == ([0, 0] if not failed else codes), logs


# A listening socket with a filter that takes no packet: as a firewall that says nothing.
DEAF = (
    QUICK
    + """
import ctypes, struct
from rallypoint.diagnose.doctor import probes

PROGRAM = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
listen = probes._listen

def listen_deaf():
    listener = listen()
    listener.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(PROGRAM)))
    return listener

probes._listen = listen_deaf
"""
)


def visit_from(
    machines: list[Machine], folder: Path, customisation: str
) -> tuple[dict[str, Any], dict[str, Any], int, int]:
    """What both say, and how both end, when the second machine visits the first."""
    if machines[0] == machines[1]:
        pytest.skip("no network namespaces can be had here")
    place = f"{machines[0].address}:29500"
    words = ("--endpoint", place, "--json")
    with listening(folder, *words, prefix=machines[0].prefix) as (process, _):
        done = doctor(
            *words, environ=environment(folder, customisation), folder=folder, prefix=machines[1].prefix
        )
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())["machines"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    assert done.stdout, done.stderr
    return told, json.loads(done.stdout)["machines"], process.returncode, done.returncode


@pytest.mark.slow
def test_two_machines_of_which_one_hears_nothing(tmp_path: Path) -> None:
    with two_machines() as machines:
        told, seen, first, second = visit_from(machines, tmp_path, DEAF)
    assert told["ways"] == seen["ways"]
    to_the_visitor, to_the_listener = seen["ways"]
    assert f"{machines[1].address}: no answer within 3 s" in to_the_visitor["error"]
    assert to_the_listener["error"] == ""
    assert [to_the_listener[name] for name in ("address", "seen_as")] == [each.address for each in machines]
    [broken] = [each for each in seen["between"] if each["state"] == "failure"]
    host = socket.gethostname()
    assert broken["found"].startswith(f"{host} (0) does not reach {host} (1): ")
    assert broken["hint"].startswith(
        f"let {host} (1) accept connections from {machines[0].address} on every port"
    )
    assert (first, second) == (1, 1)
