"""The options of `rallypoint run`: which source wins, what is refused and how, and what torchrun is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from rallypoint.errors import UsageError
from rallypoint.launch.config import CommandLine, Program, settle, split_arguments
from rallypoint.launch.endpoint import Endpoint, Endpoints
from rallypoint.launch.job import to_torchrun, torchrun_environment
from rallypoint.launch.options import (
    BY_NAME,
    OPTIONS,
    Level,
    RendezvousSettings,
    Setting,
    Settings,
    parse_conf,
)
from rallypoint.launch.rendezvous.roster import Size

TRAIN = Program("script", ("train.py",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a folder above it; nothing above that has a file of ours."""
    below = tmp_path / "project" / "scripts"
    below.mkdir(parents=True)
    return below


def settled(
    folder: Path, arguments: Mapping[str, str | bool] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    return settle(arguments or {}, environ or {}, folder)


def refusal(act: Callable[[], object], case: object) -> UsageError:
    """The error with which a case is refused."""
    try:
        act()
    except UsageError as error:
        return error
    raise AssertionError(f"{case} was not refused")


# Values ---------------------------------------------------------------------------------------------------


def test_what_nobody_speaks_of_is_built_in(folder: Path) -> None:
    assert settled(folder).everything() == {option.name: Setting(option.default) for option in OPTIONS}


OWN_VARIABLES = {
    "join_timeout": "RALLYPOINT_JOIN_TIMEOUT",
    "spares": "RALLYPOINT_SPARES",
    "health": "RALLYPOINT_HEALTH",
    "relay": "RALLYPOINT_RELAY",
    "port_range": "RALLYPOINT_PORT_RANGE",
    "patch": "RALLYPOINT_PATCH",
    "client": "RALLYPOINT_CLIENT",
    "start": "RALLYPOINT_START",
    "preload": "RALLYPOINT_PRELOAD",
    "stacks": "RALLYPOINT_STACKS",
    "stall_after": "RALLYPOINT_STALL_AFTER",
    "use_libuv": "USE_LIBUV",
    "allow_user": "RALLYPOINT_ALLOW_USER",
    "insecure": "RALLYPOINT_INSECURE",
}


def test_variables_are_those_of_torchrun_and_our_own() -> None:
    expected = {option.name: f"PET_{option.name.upper()}" for option in OPTIONS} | OWN_VARIABLES
    assert {option.name: option.variable for option in OPTIONS} == expected


ALLOWED = [
    ("nnodes", "1:4", Size(1, 4)),
    ("nnodes", " 3:3 ", Size(3, 3)),
    ("spares", "2", 2),
    ("health", "quick", "quick"),
    ("nproc_per_node", "8", 8),
    ("nproc_per_node", "gpu", "gpu"),
    ("node_rank", "98", 98),
    ("rdzv_endpoint", "", None),
    ("rdzv_endpoint", "head-0.example.org:1", Endpoints([Endpoint("head-0.example.org", 1)])),
    ("rdzv_endpoint", "[::1]:65535", Endpoints([Endpoint("::1", 65535)])),
    ("rdzv_endpoint", "::1", Endpoints([Endpoint("::1", 29400)])),
    ("rdzv_endpoint", "a,b:7", Endpoints([Endpoint("a", 7), Endpoint("b", 7)])),
    ("standalone", "1", True),
    ("standalone", "0", False),
    ("rdzv_conf", "", {}),
    ("rdzv_conf", "a=1, b = x=y", {"a": "1", "b": "x=y"}),
    ("master_addr", "[::1]", "::1"),
    ("master_port", "65535", 65535),
    ("join_timeout", "1e-3", 0.001),
    ("patch", "always", "always"),
    ("use_libuv", "AUTO", "auto"),
    ("use_libuv", "On", "1"),
    ("port_range", " 29600-29699", "29600-29699"),
    ("use_libuv", "False", "0"),
    ("allow_user", "ada, 1001", "ada, 1001"),
]


def test_what_is_allowed(folder: Path) -> None:
    for name, text, value in ALLOWED:
        beside = (
            {"nnodes": "99", "rdzv_endpoint": "head"} if name in ("nnodes", "node_rank", "spares") else {}
        )
        found = settled(folder, {**beside, name: text}).everything()[name]
        assert found.value == value, (name, text)


REFUSED = {
    "nnodes": ("", "0", "3:2", "1:", ":2", "1:2:3", "two", "1.5", "\u0661"),
    "spares": ("", "-1", "1.5", "one"),
    "health": ("", "slow", "quick full"),
    "nproc_per_node": ("", "1 2"),
    "node_rank": ("-1", "first", "1_0"),
    "rdzv_endpoint": (
        "head:0",
        "a:0,b:1",
        "a,",
        "head:65536",
        "head:",
        ":29400",
        "[::1",
        "tcp://head:1",
        "a b",
        "a:1:2",
    ),
    "standalone": ("", "yes", "2"),
    "rdzv_conf": ("a", "a=", "=1", "a=1,", ",", "a=1,b"),
    "master_addr": ("", "head:1", "[head]"),
    "master_port": ("", "0", "65536", "http"),
    "join_timeout": ("0", "-1", "nan", "inf", "10m"),
    "relay": ("", "1", "On"),
    "port_range": ("", "29600", "2-1", "0-9", "1-65536", "29600:29699"),
    "patch": ("Always", "autoalways"),
    "client": ("c++",),
    "start": ("", "thread"),
    "preload": ("", "a b", "a,"),
    "stacks": ("SIGKILL", "SIGNOTHING", "0", "SIGUSR1,SIGUSR1", "SIGUSR1,SIGUSR2,SIGHUP,SIGPIPE"),
    "stall_after": ("0", "-1", "never"),
    "use_libuv": ("", "2", "libuv"),
    "allow_user": ("", "ada,", "ada bob"),
    "insecure": ("", "yes"),
}


def test_what_is_refused_names_key_source_value_and_what_is_allowed(folder: Path) -> None:
    assert REFUSED.keys() == BY_NAME.keys()
    for name, text in ((name, text) for name, texts in REFUSED.items() for text in texts):
        error, option = refusal(lambda: settled(folder, {name: text}), (name, text)), BY_NAME[name]  # noqa: B023
        assert error.message == f"command line ({option.flag}): {name} cannot be {text!r}"
        assert error.hint == f"write {option.metavar or 'true or false'}: {option.help}"


# Sources --------------------------------------------------------------------------------------------------

# What command line, environment and file say, and what each comes to: with a variable of torchrun's, with one
# of our own, with a table in the file, and with an option that is torchrun's alone.
SAID: dict[str, tuple[tuple[str, object], tuple[str, object], tuple[str, object]]] = {
    "nproc_per_node": (("2", 2), ("gpu", "gpu"), ("'cpu'", "cpu")),
    "join_timeout": (("1", 1.0), ("2.5", 2.5), ("3", 3.0)),
    "use_libuv": (("1", "1"), ("auto", "auto"), ("false", "0")),
    "rdzv_conf": (("a=1", {"a": "1"}), ("b=2", {"b": "2"}), ("{c = 3, d = true}", {"c": "3", "d": "true"})),
    "max_restarts": (("1", "1"), ("2", "2"), ("3", 3)),
}


@pytest.mark.parametrize("name", SAID)
def test_command_line_over_environment_over_file_over_built_in(folder: Path, name: str) -> None:
    """With each of the eight sets of sources that can speak, the highest counts, and says so."""
    option, toml = BY_NAME.get(name), folder / "rallypoint.toml"
    flag, variable = f"--{name.replace('_', '-')}", option.variable if option else f"PET_{name.upper()}"
    sources = [f"command line ({flag})", f"environment ({variable})", f"{toml} (run.{name})"]
    for levels in (chosen for count in range(4) for chosen in combinations(range(3), count)):
        texts = [text if level in levels else "" for level, (text, _) in enumerate(SAID[name])]
        toml.write_text(f"[run]\n{name} = {texts[2]}\n" if texts[2] else "[run]\n")
        result = settled(folder, {name: texts[0]} if texts[0] else {}, {variable: texts[1]}).everything()
        if levels:
            highest = min(levels)
            expected = Setting(SAID[name][highest][1], sources[highest], Level(highest))
            assert result[name] == expected, levels
        else:
            assert result.get(name) == (Setting(option.default) if option else None)


# Files ----------------------------------------------------------------------------------------------------

OURS, PYPROJECT, FOREIGN = "rallypoint.toml", "pyproject.toml", "[project]\nname = 'x'\n"

# What is in which folder, and which value counts.
PLACES: list[tuple[list[tuple[str, str, int | None]], int]] = [
    ([("..", OURS, 1)], 1),
    ([("../..", PYPROJECT, 1)], 1),
    ([(".", OURS, 1), (".", PYPROJECT, 2)], 1),
    ([(".", OURS, 1), ("..", OURS, 2)], 1),
    ([(".", PYPROJECT, 1), ("..", OURS, 2)], 1),
    ([(".", PYPROJECT, None), ("..", PYPROJECT, 2)], 2),
]


def test_the_nearest_folder_wins_and_in_it_our_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (files, expected) in enumerate(PLACES):
        folder = tmp_path / str(number) / "project" / "scripts"
        folder.mkdir(parents=True)
        for place, name, value in files:
            table = "[run]" if name == OURS else "[tool.rallypoint.run]"
            text = FOREIGN if value is None else f"{table}\nmaster-port = {value}\n"
            (folder / place / name).write_text(text)
        monkeypatch.chdir(folder)
        assert settled(folder).master_port.value == settled(Path()).master_port.value == expected, files


def test_an_empty_file_of_ours_ends_the_search(folder: Path) -> None:
    (folder.parent / OURS).write_text("[run]\ntee = 3\n")
    (folder / OURS).touch()
    assert not settled(folder).passed_on


@pytest.mark.parametrize(
    ("name", "table", "key"),
    [(OURS, "run", "nproc_per-node"), (PYPROJECT, "tool.rallypoint.run", "nproc-per-node")],
)
def test_keys_in_both_spellings_in_both_files(folder: Path, name: str, table: str, key: str) -> None:
    (folder / name).write_text(f"[{table}]\n{key} = 2\n")
    assert settled(folder).nproc_per_node == Setting(2, f"{folder / name} ({table}.{key})", Level.FILE)


def test_a_relative_folder_in_a_file_counts_from_the_file(folder: Path) -> None:
    (folder.parent / OURS).write_text("[run]\nlog-dir = 'logs'\n")
    assert settled(folder).passed_on["log_dir"].value == str(folder.parent / "logs")


def test_a_file_may_begin_with_a_byte_order_mark_and_have_lines_as_on_windows(folder: Path) -> None:
    (folder / OURS).write_bytes(b"\xef\xbb\xbf[run]\r\nclient = 'torch'\r\n")
    assert settled(folder).client.value == "torch"


# In rallypoint.toml and in pyproject.toml: @ stands for the tables around ours.
WRONG_IN_A_FILE = [
    ("[@run]\ntee = 1\n[@serve]\nport = 1", "there is no table @serve", "there are [@run] and [@env]"),
    ("@nnodes = 2", "there is no table @nnodes", "nnodes goes below [@run]"),
    ("@run = 2", "@run is 2, but must be a table", "write [@run]"),
    ("@env = 3", "@env is 3, but must be a table", "write [@env]"),
    ("[@env]\nA = true", "(@env.A) is True", 'write NAME = "text" or a whole number'),
]
WRONG_IN_PYPROJECT = [("tool.rallypoint = 3", "tool.rallypoint is 3, but must be a table", "")]
WRONG_IN_OURS = [
    ("[run]\nrole = '\udcff'", "cannot be read: 'utf-8'", "readable UTF-8"),
    ("[run]\nrdzv-id = 1\nrdzv_id = 1", "rdzv_id is there twice", "keep one"),
    ("[run]\nmaster-port = true", "(run.master-port): master_port cannot be 'true'", "write PORT"),
    ("[run]\nnnodes = [1, 4]", "nnodes cannot be [1, 4]", "a text, a number"),
    ("[run]\njoin-timeout = nan", "join_timeout cannot be 'nan'", "write SECONDS"),
    ("[run]\njoin-timeout = 2020-01-01", "join_timeout cannot be datetime", "a number"),
    ("[run.env]\nA = '1'", "env cannot be a table", "a text, a number, true or false"),
    ("[run.rdzv-conf]\na = 'b,c=d'", "rdzv_conf cannot be {'a': 'b,c=d'}", "without commas"),
    ("[run.rdzv-conf]\n'a=b' = 'c'", "rdzv_conf cannot be {'a=b': 'c'}", "a table"),
    ("[run.rdzv-conf]\na = [1]", "rdzv_conf cannot be {'a': [1]}", "a table of these"),
    ("[run.rdzv-conf]\na = ''", "rdzv_conf cannot be 'a='", "K=V"),
    ("[run]\nnnodes = \n", "is not valid TOML: Invalid value (at line 2, column 10)", "correct it"),
    ("[env]\nA = 1.5", "(env.A) is 1.5", "whole number"),
    ("[env.A]\nB = 1", "(env.A) is {'B': 1}", "whole number"),
    ("[env]\n'' = 'x'", "(env.) is 'x'", "write NAME"),
    ("[env]\n'A=B' = 'x'", "(env.A=B) is 'x'", "write NAME"),
    ('[env]\n"A\\u0000" = "x"', "is 'x'", "write NAME"),
    ('[env]\nA = "x\\u0000"', "is 'x\\x00'", "write NAME"),
]


@pytest.mark.parametrize(
    ("name", "prefix", "wrong"),
    [
        (OURS, "", WRONG_IN_A_FILE + WRONG_IN_OURS),
        (PYPROJECT, "tool.rallypoint.", WRONG_IN_A_FILE + WRONG_IN_PYPROJECT),
    ],
)
def test_what_is_wrong_in_a_file(
    folder: Path, name: str, prefix: str, wrong: Sequence[tuple[str, str, str]]
) -> None:
    for text, message, hint in wrong:
        (folder / name).write_bytes(text.replace("@", prefix).encode(errors="surrogateescape"))
        error = refusal(lambda: settled(folder), text)
        assert error.message.startswith(str(folder / name)), text
        assert message.replace("@", prefix) in error.message, text
        assert hint.replace("@", prefix) in error.hint, text


def test_another_backend_in_the_file_is_refused(folder: Path) -> None:
    (folder / OURS).write_text("[run]\nrdzv-backend = 'rallypoint'\n")
    assert not settled(folder).passed_on
    (folder / OURS).write_text("[run]\nrdzv-backend = 'c10d'\n")
    with pytest.raises(UsageError, match="--rdzv-backend is 'c10d'"):
        settled(folder)


@pytest.mark.parametrize(
    "text", [b"[project\n", b"# \xff\n", b"tool = 'rallypoint'", b"tool.x = 'rallypoint'"]
)
def test_a_file_that_is_not_about_us_is_not_our_affair(folder: Path, text: bytes) -> None:
    (folder / PYPROJECT).write_bytes(text)
    (folder.parent / OURS).write_text("[run]\ntee = 3\n")
    assert settled(folder).passed_on["tee"].value == 3


# Variables for the job ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "prefix"), [(OURS, ""), (PYPROJECT, "tool.rallypoint.")])
def test_the_file_has_variables_for_the_job(folder: Path, name: str, prefix: str) -> None:
    """A variable that is set wins, even if it is set to nothing."""
    (folder / name).write_text(
        f"[{prefix}env]\nIFNAME = 'eth0'\nTHREADS = 4\nEMPTY = ''\nSET = '1'\nSET_EMPTY = '1'\n"
    )
    found = settled(folder, environ={"SET": "2", "SET_EMPTY": ""})
    source = f"{folder / name} ({prefix}env.%s)"
    rows = [(key, text, source % key) for key, text in (("IFNAME", "eth0"), ("THREADS", "4"), ("EMPTY", ""))]
    assert [(key, each.value, each.source) for key, each in found.variables.items()] == rows
    assert list(found.everything())[-3:] == ["env.IFNAME", "env.THREADS", "env.EMPTY"]


# What several options say together ------------------------------------------------------------------------

CLI, ENV, FILE = Level.COMMAND_LINE, Level.ENVIRONMENT, Level.FILE


def settled_from(folder: Path, *said: tuple[Level, str, str]) -> Settings:
    """The settings from (level, name, text)."""
    environ = {BY_NAME[name].variable: text for level, name, text in said if level is ENV}
    lines = [f"{name} = {text!r}" for level, name, text in said if level is FILE]
    (folder / OURS).write_text("\n".join(["[run]", *lines]))
    return settled(folder, {name: text for level, name, text in said if level is CLI}, environ)


ENDPOINTS: list[tuple[list[tuple[Level, str, str]], str, str]] = [
    ([(ENV, "master_addr", "::1")], "[::1]:29500", "environment (PET_MASTER_ADDR)"),
    ([(CLI, "master_port", "7")], "127.0.0.1:7", "command line (--master-port)"),
    ([(CLI, "master_addr", "a"), (CLI, "master_port", "7")], "a:7", "command line (--master-addr)"),
    ([(FILE, "master_addr", "a"), (ENV, "master_port", "7")], "a:7", "environment (PET_MASTER_PORT)"),
    ([(CLI, "master_addr", "a"), (CLI, "rdzv_endpoint", "b")], "b:29400", "command line (--rdzv-endpoint)"),
    ([(ENV, "master_addr", "a"), (FILE, "rdzv_endpoint", "b")], "a:29500", "environment (PET_MASTER_ADDR)"),
    ([(ENV, "master_addr", "a"), (CLI, "rdzv_endpoint", "")], "", "command line (--rdzv-endpoint)"),
    ([(CLI, "standalone", "true"), (ENV, "rdzv_endpoint", "b")], "", "command line (--standalone)"),
    ([(ENV, "standalone", "1"), (FILE, "master_addr", "b")], "", "environment (PET_STANDALONE)"),
    ([(FILE, "standalone", "0"), (FILE, "master_addr", "b")], "b:29500", "rallypoint.toml (run.master_addr)"),
    ([(FILE, "standalone", "1"), (ENV, "rdzv_endpoint", "b:1")], "b:1", "environment (PET_RDZV_ENDPOINT)"),
    ([(CLI, "standalone", "1"), (CLI, "rdzv_endpoint", "")], "", "command line (--standalone)"),
]


def test_the_endpoint_by_the_highest_source(folder: Path) -> None:
    for said, endpoint, source in ENDPOINTS:
        result = settled_from(folder, *said).rdzv_endpoint
        assert (result.text, result.is_set) == (endpoint, True), said
        assert result.source.endswith(source), said


# What is said, and what torchrun gets as rdzv_conf.
IN_RDZV_CONF: list[tuple[list[tuple[Level, str, str]], dict[str, str]]] = [
    ([(CLI, "node_rank", "0"), (CLI, "relay", "off")], {"join_timeout": "600", "rank": "0", "relay": "off"}),
    ([(ENV, "port_range", "1-2")], {"join_timeout": "600", "port_range": "1-2"}),
    ([(CLI, "rdzv_conf", "rank=0,join_timeout=5,a=1")], {"rank": "0", "join_timeout": "5", "a": "1"}),
    ([(CLI, "rdzv_conf", "rank=0"), (ENV, "node_rank", "7")], {"rank": "0", "join_timeout": "600"}),
    ([(ENV, "rdzv_conf", "join_timeout=5,a=1"), (CLI, "join_timeout", "6")], {"a": "1", "join_timeout": "6"}),
    ([(FILE, "rdzv_conf", "join_timeout=5"), (ENV, "join_timeout", "6")], {"join_timeout": "6"}),
    ([(CLI, "rdzv_conf", "join_timeout=5"), (CLI, "join_timeout", "5.0")], {"join_timeout": "5"}),
    ([(CLI, "rdzv_conf", "x=5"), (FILE, "join_timeout", "0.5")], {"x": "5", "join_timeout": "0.5"}),
]


def test_rdzv_conf_may_say_rank_and_join_timeout(folder: Path) -> None:
    for said, expected in IN_RDZV_CONF:
        parsed = get_args_parser().parse_args(to_torchrun(settled_from(folder, *said), TRAIN, "files"))
        conf = dict(pair.split("=") for pair in parsed.rdzv_conf.split(","))
        assert conf.pop("max_restarts") == "0"
        assert conf == expected, said


def test_what_torchruns_rdzv_conf_says_to_the_backend(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_conf({}) == RendezvousSettings()
    conf = {
        "rank": "3",
        "join_timeout": " 5",
        "keep_alive_max_attempt": "0",
        "workers": "auto",
        "spares": "1",
    }
    switches = {"is_host": "off", "relay": "on", "port_range": "1-2", "max_restarts": "03"}
    found = parse_conf({**conf, **switches, "timeout": "7", "joint_timeout": "1"})
    expected = RendezvousSettings(rank=3, join_timeout=5.0, keep_alive_max_attempt=1, spares=1)
    expected = replace(expected, is_host=False, relay="on", port_range=range(1, 3), max_restarts="3")
    assert found == expected
    assert [found.examination, replace(found, spares=0).examination] == ["quick", "off"]
    shared = (("--nnodes", "2"), ("--spares", "1"), ("--relay", "on"), ("--max-restarts", "3"))
    assert found.shared(Size(2, 2), has_relays=True) == shared
    assert ["did you mean join_timeout?" in each for each in caplog.messages] == [True]
    for name, text in (
        ("rank", "x"),
        ("close_timeout", "0"),
        ("relay", "1"),
        ("workers", "65"),
        ("health", ""),
    ):
        error = refusal(lambda: parse_conf({name: text}), name)  # noqa: B023
        assert (error.message, error.hint[:6]) == (f"{name} in --rdzv-conf is {text!r}", "write ")


CONTRADICTIONS = [
    ({"nnodes": "1:2"}, "nnodes is 1:2 by command line (--nnodes), but nothing says", "--rdzv-endpoint HOST"),
    ({"nnodes": "2", "master_port": "7"}, "nothing says where the machines meet", "--rdzv-endpoint"),
    ({"nnodes": "2", "standalone": "1"}, "nothing says where the machines meet", "--rdzv-endpoint"),
    ({"node_rank": "1"}, "node_rank is 1 by command line (--node-rank), but nnodes is 1", "from 0 to 0"),
    ({"node_rank": "4", "nnodes": "2:4", "rdzv_endpoint": "a"}, "nnodes is 2:4", "from 0 to 3"),
    ({"rdzv_conf": "rank=1"}, "node_rank is 1 by command line (--rdzv-conf)", "from 0 to 0"),
    ({"rdzv_conf": "rank=x"}, "(--rdzv-conf), rank: node_rank cannot be 'x'", "from 0 on"),
    ({"rdzv_conf": "join_timeout=5", "join_timeout": "6"}, "join_timeout is 6 by", "leave out one"),
    ({"standalone": "1", "rdzv_endpoint": "a"}, "there is a:29400 as well", "leave out one"),
    ({"standalone": "1", "master_addr": "a"}, "there is a:29500 as well", "leave out one"),
]


def test_contradictions(folder: Path) -> None:
    for arguments, message, hint in CONTRADICTIONS:
        error = refusal(lambda: settled(folder, arguments), arguments)  # noqa: B023
        assert message in error.message, arguments
        assert hint in error.hint, arguments


# The command line -----------------------------------------------------------------------------------------


LINES: list[tuple[str, dict[str, str | bool], Program]] = [
    ("train.py --nnodes 2 -h", {}, Program("script", ("train.py", "--nnodes", "2", "-h"))),
    ("--nproc-per-node 2 train.py", {"nproc_per_node": "2"}, TRAIN),
    ("--rdzv_conf=a=1,b=2 train.py", {"rdzv_conf": "a=1,b=2"}, TRAIN),
    ("--log-dir=-x train.py", {"log_dir": "-x"}, TRAIN),
    ("--nnodes 1 --nnodes 2 train.py", {"nnodes": "2"}, TRAIN),
    ("-t3 -r=0:1 train.py", {"tee": "3", "redirects": "0:1"}, TRAIN),
    ("--standalone train.py", {"standalone": True}, TRAIN),
    ("--rdzv_backend rallypoint train.py", {}, TRAIN),
    ("-m pkg.train -m x", {}, Program("module", ("pkg.train", "-m", "x"))),
    ("-m --nnodes 2 pkg.train", {"nnodes": "2"}, Program("module", ("pkg.train",))),
    ("-- torchrun --nnodes 2 x.py", {}, Program("command", ("torchrun", "--nnodes", "2", "x.py"))),
    ("--patch always -- -- a", {"patch": "always"}, Program("command", ("--", "a"))),
    ("- x", {}, Program("script", ("-", "x"))),
    # What is torchrun's, and what may become so: an option that nobody here has heard of.
    ("--no-python ./program", {"no_python": True}, Program("script", ("./program",))),
    ("--new train.py x", {"new": True}, Program("script", ("train.py", "x"))),
    ("--new value train.py", {"new": "value"}, TRAIN),
    ("--new -m pkg.train", {"new": True}, Program("module", ("pkg.train",))),
    ("--new --nnodes 1 program", {"new": True, "nnodes": "1"}, Program("script", ("program",))),
    ("-x 1 train.py", {"x": "1"}, TRAIN),
]


def test_command_lines() -> None:
    for line, options, target in LINES:
        assert split_arguments(line.split()) == CommandLine(options, target), line


def test_command_lines_that_start_nothing() -> None:
    assert split_arguments(["--nnodes", "2", "-h"]) == CommandLine(help=True)
    assert split_arguments(["-m", "--show-config"]) == CommandLine(show_config=True)
    shown = split_arguments(["--show_config", "--json", "--tee", "1", "train.py"])
    assert shown == CommandLine({"tee": "1"}, TRAIN, show_config=True, json=True)


WRONG_LINES: list[tuple[list[str], str, str]] = [
    (["--nnodes", "2"], "there is no script to start", "rallypoint run [OPTIONS] SCRIPT"),
    ([""], "there is no script to start", "SCRIPT"),
    (["--json"], "there is no script", "SCRIPT"),
    (["-m"], "there is no module to start", "-m MODULE"),
    (["--"], "there is no command behind --", "-- COMMAND"),
    (["--", ""], "there is no command behind --", "-- COMMAND"),
    (["-m", "--", "x"], "both -m and a command", "-m MODULE"),
    (["-m", "train.py"], "-m takes a module, but train.py is a script", "leave out -m"),
    (["-m", "pkg/train"], "-m takes a module, but pkg/train is a script", "leave out -m"),
    (["--nnodes"], "--nnodes needs a value", "--nnodes VALUE"),
    (["--nnodes", "--tee", "3", "x.py"], "--nnodes needs a value", "--nnodes=VALUE"),
    (["--standalone=1", "x.py"], "--standalone takes no value", "by itself"),
    (["-mpkg"], "-m takes no value, but -mpkg gives it one", "by itself"),
    (["--rdzv-backend", "c10d", "x.py"], "--rdzv-backend is 'c10d'", "run -- torchrun --rdzv-backend=c10d"),
]


def test_command_lines_that_cannot_be_meant() -> None:
    for line, message, hint in WRONG_LINES:
        error = refusal(lambda: split_arguments(line), line)  # noqa: B023
        assert message in error.message, line
        assert hint in error.hint, line


WORDS = st.one_of(
    st.text(max_size=8), st.sampled_from(["--", "-", "", "-m", "-h", "--help", "--nnodes=2", "-t3", "a b"])
)
MODES = st.sampled_from(
    [([], "script", "train.py"), (["-m"], "module", "pkg.train"), (["--"], "command", "-x")]
)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(MODES, st.lists(WORDS, max_size=6))
@example(([], "script", "train.py"), ["--", "--nnodes=3"])
def test_what_stands_behind_the_target_is_untouched(
    mode: tuple[list[str], str, str], rest: list[str]
) -> None:
    """Neither by us nor by torchrun's own parser."""
    how, kind, first = mode
    target = split_arguments(["--nnodes", "1", *how, first, *rest]).target
    assert target is not None
    assert (target.kind, target.words) == (kind, (first, *rest))
    if kind != "command":
        parsed = get_args_parser().parse_args(to_torchrun(NOTHING_SAID, target, "files"))
        assert (parsed.training_script, *parsed.training_script_args) == target.words
        assert (parsed.module, parsed.rdzv_backend) == (kind == "module", "rallypoint")


NOTHING_SAID = Settings(**{option.name: Setting(option.default) for option in OPTIONS})  # type: ignore[arg-type]


# torchrun -------------------------------------------------------------------------------------------------


def test_every_option_of_torchrun_finds_its_value_and_the_script() -> None:
    """With a blank or an equals sign between them, in both spellings; whatever this torch has."""
    for action in get_args_parser()._actions:
        for flag in set(action.option_strings) - {"-m", "--module", "-h", "--help"}:
            takes_value = action.nargs != 0
            value = "rallypoint" if action.dest == "rdzv_backend" else "1" if takes_value else True
            expected = {} if action.dest == "rdzv_backend" else {action.dest: value}
            for words in [[flag, "1"], [f"{flag}=1"]] if takes_value else [[flag]]:
                given = [word.replace("1", str(value)) for word in words]
                assert split_arguments([*given, "program"]).options == expected, given


GIVEN_ON: list[tuple[str, dict[str, object]]] = [
    ("", {"nnodes": "1", "nproc_per_node": "devices", "rdzv_endpoint": "localhost:0", "max_restarts": 0}),
    ("--standalone", {"rdzv_endpoint": "localhost:0", "standalone": False}),
    ("--nnodes 4 --rdzv-endpoint a,b,c", {"rdzv_endpoint": "a:29500,b:29500,c:29500"}),
    ("--nnodes 1:4 --rdzv-endpoint head", {"nnodes": "1:4", "rdzv_endpoint": "head:29400"}),
    ("--master_addr ::1 --master_port 7", {"rdzv_endpoint": "[::1]:7", "master_port": None}),
    ("--nproc-per-node=2 --max-restarts 3 --rdzv-id=a_b", {"nproc_per_node": "2", "max_restarts": 3}),
    ("-t 3 --log-dir=-l --virtual-local-rank", {"tee": "3", "log_dir": "-l", "virtual_local_rank": True}),
    ("--patch never --client python --use-libuv 0", {"nnodes": "1", "log_dir": "files"}),
    ("--tee 3", {"log_dir": None}),
    ("-r 3", {"redirects": "3", "log_dir": None}),
]


def test_what_torchrun_makes_of_what_it_is_given(folder: Path) -> None:
    for line, expected in GIVEN_ON:
        order = split_arguments([*line.split(), "train.py"])
        parsed = get_args_parser().parse_args(to_torchrun(settled(folder, order.options), TRAIN, "files"))
        assert {name: getattr(parsed, name) for name in expected} == expected, line


def test_torchrun_gets_what_the_file_says_unless_it_finds_it_in_its_environment(folder: Path) -> None:
    (folder / OURS).write_text("[run]\ntee = 3\nmax-restarts = 2\nno-python = true\nrun-path = false\n")
    words = to_torchrun(settled(folder, {}, {"PET_TEE": "1"}), TRAIN, "files")
    assert words[5 : words.index("--")] == ["--max-restarts=2", "--no-python"]


def test_torchrun_does_not_see_the_variables_that_are_settled_or_empty() -> None:
    settled_ones = {option.variable: "1" for option in OPTIONS if option.name not in OWN_VARIABLES}
    flags = {"PET_MODULE": "1", "PET_NO_PYTHON": "1", "PET_RUN_PATH": "1", "PET_RDZV_BACKEND": "c10d"}
    kept = {"PATH": "/bin", "USE_LIBUV": "0", "RALLYPOINT_PATCH": "auto", "PET_SHUTDOWN_TIMEOUT": "5"}
    assert torchrun_environment({**settled_ones, **flags, **kept, "PET_TEE": "", "EMPTY": ""}) == {
        **kept,
        "EMPTY": "",
    }
