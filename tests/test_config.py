"""The options of `rallypoint run`: which source wins, what is refused and how, and what torchrun is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from rallypoint.errors import UsageError
from rallypoint.launch.config import Level, Setting, Settings, settle
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.options import (
    BY_NAME,
    FLAGS,
    OPTIONS,
    TORCHRUN_ONLY,
    Nodes,
    Order,
    Target,
    split_arguments,
    text_of,
)
from rallypoint.launch.torchrun import to_torchrun, torchrun_environment

TRAIN = Target("script", ("train.py",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a folder above it; nothing above that has a file of ours."""
    below = tmp_path / "project" / "scripts"
    below.mkdir(parents=True)
    return below


def settled(
    folder: Path, arguments: Mapping[str, str | None] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    return settle(arguments or {}, environ or {}, folder)


def value_of(folder: Path, name: str, text: str) -> object:
    """The value of one option that is given on the command line, with what it needs beside it."""
    needs = {"nnodes": {"rdzv_endpoint": "head"}, "node_rank": {"nnodes": "99", "rdzv_endpoint": "head"}}
    return settled(folder, {**needs.get(name, {}), name: text})[name].value


def refusal(act: Callable[[], object], case: object) -> UsageError:
    """The error with which a case is refused."""
    try:
        act()
    except UsageError as error:
        return error
    raise AssertionError(f"{case} was not refused")


# Values ---------------------------------------------------------------------------------------------------


def test_there_is_a_setting_for_each_option_in_the_order_of_the_table() -> None:
    assert [field.name for field in fields(Settings)] == [*(option.name for option in OPTIONS), "variables"]


def test_what_nobody_speaks_of_is_built_in(folder: Path) -> None:
    result = settled(folder)
    assert {option.name: result[option.name] for option in OPTIONS} == {
        option.name: Setting(option.default, "built-in", Level.BUILT_IN) for option in OPTIONS
    }
    assert not any(result[option.name].is_set for option in OPTIONS)


OWN_VARIABLES = {
    "join_timeout": "RALLYPOINT_JOIN_TIMEOUT",
    "relay": "RALLYPOINT_RELAY",
    "patch": "RALLYPOINT_PATCH",
    "client": "RALLYPOINT_CLIENT",
    "use_libuv": "USE_LIBUV",
}


def test_variables_are_those_of_torchrun_and_five_of_our_own() -> None:
    expected = {option.name: f"PET_{option.name.upper()}" for option in OPTIONS} | OWN_VARIABLES
    assert {option.name: option.variable for option in OPTIONS} == expected


ALLOWED = [
    ("nnodes", "1", Nodes(1, 1)),
    ("nnodes", "1:4", Nodes(1, 4)),
    ("nnodes", " 3:3 ", Nodes(3, 3)),
    ("nproc_per_node", "8", 8),
    *(("nproc_per_node", word, word) for word in ("devices", "auto", "gpu", "cpu", "xpu")),
    ("node_rank", "0", 0),
    ("node_rank", "98", 98),
    ("rdzv_endpoint", "", None),
    ("rdzv_endpoint", "head", Endpoint("head", 29400)),
    ("rdzv_endpoint", "head-0.example.org:1", Endpoint("head-0.example.org", 1)),
    ("rdzv_endpoint", "10.0.0.1:65535", Endpoint("10.0.0.1", 65535)),
    ("rdzv_endpoint", "[::1]:5000", Endpoint("::1", 5000)),
    ("rdzv_endpoint", "[fe80::1%eth0]", Endpoint("fe80::1%eth0", 29400)),
    ("rdzv_endpoint", "::1", Endpoint("::1", 29400)),
    ("standalone", "1", True),
    ("standalone", "0", False),
    ("rdzv_id", "job 7", "job 7"),
    ("rdzv_conf", "", {}),
    ("rdzv_conf", "a=1, b = x=y", {"a": "1", "b": "x=y"}),
    ("max_restarts", "0", 0),
    ("monitor_interval", "1e-3", 0.001),
    ("start_method", "forkserver", "forkserver"),
    ("log_dir", "logs", "logs"),
    ("redirects", "3", "3"),
    ("redirects", "0:1,1:2", "0:1,1:2"),
    ("local_ranks_filter", "0,1,12", "0,1,12"),
    ("local_ranks_filter", "", ""),
    ("master_addr", "[::1]", "::1"),
    ("master_addr", "::1", "::1"),
    ("master_port", "65535", 65535),
    ("patch", "always", "always"),
    ("client", "python", "python"),
    ("use_libuv", "AUTO", "auto"),
    *(("use_libuv", word, "1") for word in ("1", "true", "On")),
    *(("use_libuv", word, "0") for word in ("0", "False", "off")),
]


def test_what_is_allowed(folder: Path) -> None:
    for name, text, value in ALLOWED:
        assert value_of(folder, name, text) == value, (name, text)


REFUSED = {
    "nnodes": ("", "0", "0:2", "3:2", "-1", "1:", ":2", "1:2:3", "two", "1.5", "\u0661"),
    "nproc_per_node": ("", "0", "gpus", "GPU", "1.5"),
    "node_rank": ("-1", "first", "1_0"),
    "rdzv_endpoint": (
        *("head:0", "head:65536", "head:", "head:x", ":29400"),
        *("[::1", "[head]:1", "tcp://head:1", "a b", "a:1:2", "head:-1"),
    ),
    "standalone": ("", "yes", "2"),
    "rdzv_id": ("",),
    "rdzv_conf": ("a", "a=", "=1", "a=1,", ",", "a=1,b"),
    "max_restarts": ("-1", "0.5"),
    "monitor_interval": ("0", "-1", "nan", "inf", "soon"),
    "start_method": ("SPAWN", "forks"),
    "role": ("",),
    "local_addr": ("", "node:1", "a b"),
    "log_dir": ("",),
    "redirects": ("", "4", "0:4", "0:1,", "10:1", "out"),
    "tee": ("4",),
    "local_ranks_filter": ("a", "0,", "-1", "0 1"),
    "master_addr": ("", "head:1", "[head]"),
    "master_port": ("", "0", "65536", "http"),
    "join_timeout": ("0", "10m"),
    "relay": ("", "1", "On"),
    "patch": ("Always", "autoalways"),
    "client": ("c++",),
    "use_libuv": ("", "2", "libuv"),
}


def test_what_is_refused_names_key_source_value_and_what_is_allowed(folder: Path) -> None:
    for name, text in ((name, text) for name, texts in REFUSED.items() for text in texts):
        error, option = refusal(lambda: settled(folder, {name: text}), (name, text)), BY_NAME[name]  # noqa: B023
        assert error.message == f"command line ({option.flag}): {name} cannot be {text!r}"
        assert error.hint == f"write {option.kind.allowed}"


def test_every_option_refuses_something() -> None:
    assert REFUSED.keys() == BY_NAME.keys()


def test_a_built_in_value_is_one_that_could_have_been_written() -> None:
    for option in OPTIONS:
        if option.default is not None:
            assert option.read(text_of(option.default), "test") == option.default, option.name


# Sources --------------------------------------------------------------------------------------------------

# For one option of each kind: what the file says, and what it comes to.
IN_FILE: dict[str, tuple[str, object]] = {
    "nnodes": ("4", Nodes(4, 4)),
    "nproc_per_node": ("'cpu'", "cpu"),
    "node_rank": ("2", 2),
    "rdzv_endpoint": ("'c:2'", Endpoint("c", 2)),
    "standalone": ("false", False),
    "rdzv_id": ("'c'", "c"),
    "rdzv_conf": ("{c = 3, d = true}", {"c": "3", "d": "true"}),
    "max_restarts": ("3", 3),
    "monitor_interval": ("0.5", 0.5),
    "start_method": ("'forkserver'", "forkserver"),
    "redirects": ("3", "3"),
    "local_ranks_filter": ("'2,3'", "2,3"),
    "master_addr": ("'c'", "c"),
    "master_port": ("3", 3),
    "log_dir": ("'/c'", "/c"),
    "join_timeout": ("3", 3.0),
    "relay": ("'off'", "off"),
    "patch": ("'never'", "never"),
    "client": ("'torch'", "torch"),
    "use_libuv": ("false", "0"),
}


def test_the_file_has_values_of_each_kind(folder: Path) -> None:
    kinds = {BY_NAME[name].kind.metavar for name in IN_FILE}
    assert kinds | {"TEXT"} == {each.kind.metavar for each in OPTIONS}
    toml = folder / "rallypoint.toml"
    for name, (text, value) in IN_FILE.items():
        beside = {"nnodes": "9", "rdzv_endpoint": "head"} if name in ("nnodes", "node_rank") else {}
        toml.write_text(f"[run]\n{name} = {text}\n")
        result = settled(folder, {each: said for each, said in beside.items() if each != name})[name]
        assert result == Setting(value, f"{toml} (run.{name})", Level.FILE), name


# What command line, environment and file say, and what each comes to: with a variable of torchrun's, with one
# of our own, and with a table in the file.
SAID: dict[str, tuple[tuple[str, object], tuple[str, object], tuple[str, object]]] = {
    "nproc_per_node": (("2", 2), ("gpu", "gpu"), ("'cpu'", "cpu")),
    "join_timeout": (("1", 1.0), ("2.5", 2.5), ("3", 3.0)),
    "rdzv_conf": (("a=1", {"a": "1"}), ("b=2", {"b": "2"}), ("{c = 3, d = true}", {"c": "3", "d": "true"})),
}


@pytest.mark.parametrize("name", SAID)
def test_command_line_over_environment_over_file_over_built_in(folder: Path, name: str) -> None:
    """With each of the eight sets of sources that can speak, the highest counts, and says so."""
    option, toml = BY_NAME[name], folder / "rallypoint.toml"
    values = [*(value for _, value in SAID[name]), option.default]
    sources = [
        f"command line ({option.flag})",
        f"environment ({option.variable})",
        f"{toml} (run.{name})",
        "built-in",
    ]
    for levels in (chosen for count in range(4) for chosen in combinations(range(3), count)):
        texts = [text if level in levels else None for level, (text, _) in enumerate(SAID[name])]
        toml.write_text(f"[run]\n{name} = {texts[2]}\n" if texts[2] is not None else "[run]\n")
        result = settled(folder, {name: texts[0]}, {option.variable: texts[1] or ""})[name]
        highest = min(levels, default=3)
        assert result == Setting(values[highest], sources[highest], Level(highest)), levels


def test_an_empty_variable_is_as_good_as_none(folder: Path) -> None:
    assert settled(folder, {}, {option.variable: "" for option in OPTIONS}) == settled(folder)


def test_a_value_that_is_overruled_is_not_looked_at_unless_it_is_in_the_file(folder: Path) -> None:
    assert settled(folder, {"tee": "3"}, {"PET_TEE": "what"}).tee.value == "3"
    (folder / "rallypoint.toml").write_text("[run]\ntee = 'what'\n")
    with pytest.raises(UsageError, match="tee cannot be 'what'"):
        settled(folder, {"tee": "3"})


# Files ----------------------------------------------------------------------------------------------------

HERE, ABOVE = "", ".."
OURS, PYPROJECT, FOREIGN = "rallypoint.toml", "pyproject.toml", "[project]\nname = 'x'\n"


# What is in which folder, and which value counts.
PLACES: list[tuple[list[tuple[str, str, int | None]], int]] = [
    ([], 0),
    ([(HERE, OURS, 1)], 1),
    ([(HERE, PYPROJECT, 1)], 1),
    ([(ABOVE, OURS, 1)], 1),
    ([("../..", PYPROJECT, 1)], 1),
    ([(HERE, OURS, 1), (HERE, PYPROJECT, 2)], 1),
    ([(HERE, OURS, 1), (ABOVE, OURS, 2)], 1),
    ([(HERE, PYPROJECT, 1), (ABOVE, OURS, 2)], 1),
    ([(HERE, PYPROJECT, None), (ABOVE, PYPROJECT, 2)], 2),
    ([(HERE, PYPROJECT, None), (ABOVE, OURS, 2)], 2),
]


def test_the_nearest_folder_wins_and_in_it_our_own_file(tmp_path: Path) -> None:
    for number, (files, expected) in enumerate(PLACES):
        folder = tmp_path / str(number) / "project" / "scripts"
        folder.mkdir(parents=True)
        for place, name, value in files:
            table = "[run]" if name == OURS else "[tool.rallypoint.run]"
            text = FOREIGN if value is None else f"{table}\nmax-restarts = {value}\n"
            (folder / place / name).write_text(text)
        assert settled(folder).max_restarts.value == expected, files


def test_an_empty_file_of_ours_ends_the_search(folder: Path) -> None:
    (folder.parent / OURS).write_text("[run]\ntee = 3\n")
    (folder / OURS).touch()
    assert not settled(folder).tee.is_set


def test_the_folder_may_be_relative(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / OURS).write_text("[run]\ntee = 3\n")
    monkeypatch.chdir(folder)
    assert settled(Path()).tee.value == "3"


@pytest.mark.parametrize(
    ("name", "table", "key"),
    [(OURS, "run", "nproc_per-node"), (PYPROJECT, "tool.rallypoint.run", "nproc-per-node")],
)
def test_keys_in_both_spellings_in_both_files(folder: Path, name: str, table: str, key: str) -> None:
    (folder / name).write_text(f"[{table}]\n{key} = 2\n")
    result = settled(folder).nproc_per_node
    assert result.value == 2
    assert result.source == f"{folder / name} ({table}.{key})"


def test_a_table_of_settings_for_the_rendezvous(folder: Path) -> None:
    (folder / OURS).write_text("[run.rdzv-conf]\nlast_call = 30\nname = 'x y'\nslow = false\n")
    assert settled(folder).rdzv_conf.value == {"last_call": "30", "name": "x y", "slow": "false"}


def test_a_relative_folder_in_a_file_counts_from_the_file(folder: Path) -> None:
    (folder.parent / OURS).write_text("[run]\nlog-dir = 'logs'\n")
    assert settled(folder).log_dir.value == str(folder.parent / "logs")


def test_lines_may_end_as_on_windows(folder: Path) -> None:
    (folder / OURS).write_bytes(b"[run]\r\nrole = 'r'\r\n")
    assert settled(folder).role.value == "r"


def test_a_file_may_begin_with_a_byte_order_mark(folder: Path) -> None:
    (folder / OURS).write_text("\ufeff[run]\ntee = 3\n", encoding="utf-8")
    assert settled(folder).tee.value == "3"


# In rallypoint.toml and in pyproject.toml: @ stands for the tables around ours.
WRONG_IN_A_FILE = [
    (
        "[@run]\nnproc-per-nod = 2",
        "(@run.nproc-per-nod): there is no option",
        "did you mean nproc_per_node",
    ),
    ("[@run]\nrestarts = 2", "no option 'restarts'", "did you mean max_restarts?"),
    ("[@run]\nzzz = 2", "no option 'zzz'", "known: nnodes, nproc_per_node"),
    ("[@run]\nrdzv-backend = 'c10d'", "no option 'rdzv-backend'", "rallypoint run -- torchrun"),
    ("[@run.env]\nA = '1'", "no option 'env'", ""),
    ("[@run]\ntee = 1\n[@serve]\nport = 1", "there is no table @serve", "there are [@run] and [@env]"),
    ("@nnodes = 2", "there is no table @nnodes", "nnodes goes below [@run]"),
    ("@run = 2", "@run is 2, but must be a table", "write [@run]"),
    ("[@run]\nmax-restarts = 1\nmax_restarts = 1", "max_restarts is there twice", "keep one"),
    ("[@run]\nmax-restarts = '1'", "max_restarts cannot be '1'", "0 or more; in TOML, an integer"),
    ("[@run]\nmax-restarts = true", "max_restarts cannot be True", "in TOML, an integer"),
    ("[@run]\nmax-restarts = 1.0", "max_restarts cannot be 1.0", "in TOML, an integer"),
    ("[@run]\nmax-restarts = -1", "max_restarts cannot be '-1'", "0 or more"),
    ("[@run]\nnnodes = [1, 4]", "nnodes cannot be [1, 4]", "in TOML, an integer or a string"),
    ("[@run]\nnnodes = '4:1'", "nnodes cannot be '4:1'", "MIN not above MAX"),
    ("[@run]\njoin-timeout = nan", "join_timeout cannot be 'nan'", "a number of seconds above 0"),
    ("[@run]\njoin-timeout = 2020-01-01", "join_timeout cannot be datetime", "an integer or a float"),
    ("[@run]\nrole = 3", "role cannot be 3", "in TOML, a string"),
    ("[@run]\nrole = ''", "role cannot be ''", "not empty"),
    ("[@run]\nstandalone = 1", "standalone cannot be 1", "in TOML, true or false"),
    ("[@run]\nuse-libuv = 2", "use_libuv cannot be '2'", "auto"),
    ("[@run]\nrdzv-conf = 'a'", "rdzv_conf cannot be 'a'", "KEY=VALUE"),
    ("[@run.rdzv-conf]\na = 'b,c=d'", "rdzv_conf cannot be {'a': 'b,c=d'}", "no commas"),
    ("[@run.rdzv-conf]\n'a=b' = 'c'", "rdzv_conf cannot be {'a=b': 'c'}", "KEY=VALUE"),
    ("[@run.rdzv-conf]\na = [1]", "rdzv_conf cannot be {'a': [1]}", "plain values"),
    ("[@run.rdzv-conf]\na = ''", "rdzv_conf cannot be 'a='", "KEY=VALUE"),
    ("[@run]\nnnodes = \n", "is not valid TOML: Invalid value (at line 2, column 10)", "correct it"),
]


def _assert_refused(folder: Path, name: str, wrong: Sequence[tuple[str, str, str]]) -> None:
    prefix = "" if name == OURS else "tool.rallypoint."
    for text, message, hint in wrong:
        (folder / name).write_text(text.replace("@", prefix))
        error = refusal(lambda: settled(folder), text)
        assert error.message.startswith(str(folder / name)), text
        assert message.replace("@", prefix) in error.message, text
        assert hint.replace("@", prefix) in error.hint, text


def test_what_is_wrong_in_a_file(folder: Path) -> None:
    _assert_refused(folder, OURS, WRONG_IN_A_FILE)


def test_what_is_wrong_in_a_pyproject(folder: Path) -> None:
    """The same, in other tables: those rows that name them."""
    _assert_refused(folder, PYPROJECT, [row for row in WRONG_IN_A_FILE if "@" in row[1] + row[2]])


@pytest.mark.parametrize("text", [b"[run]\nrole = '\xff'\n", b"\x00\xff"])
def test_a_file_that_is_no_text(folder: Path, text: bytes) -> None:
    (folder / OURS).write_bytes(text)
    with pytest.raises(UsageError, match=r"rallypoint\.toml cannot be read: .*utf-8"):
        settled(folder)


@pytest.mark.parametrize("text", [b"[project\n", b"# \xff\n"])
def test_a_broken_file_that_does_not_speak_of_us_is_not_our_affair(folder: Path, text: bytes) -> None:
    (folder / PYPROJECT).write_bytes(text)
    (folder.parent / OURS).write_text("[run]\ntee = 3\n")
    assert settled(folder).tee.value == "3"


@pytest.mark.parametrize(
    "text", ["tool = 'rallypoint'", "[project]\nname = 'rallypoint'", "tool.x = 'rallypoint'"]
)
def test_a_file_that_only_mentions_us_has_no_settings(folder: Path, text: str) -> None:
    (folder / PYPROJECT).write_text(text)
    assert settled(folder) == settled(folder.parent)


def test_a_tool_table_that_is_no_table(folder: Path) -> None:
    (folder / PYPROJECT).write_text("tool.rallypoint = 3")
    with pytest.raises(UsageError, match=r"tool\.rallypoint is 3, but must be a table"):
        settled(folder)


# Variables for the job ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "prefix"), [(OURS, ""), (PYPROJECT, "tool.rallypoint.")])
def test_the_file_has_variables_for_the_job(folder: Path, name: str, prefix: str) -> None:
    (folder / name).write_text(
        f"[{prefix}env]\nGLOO_SOCKET_IFNAME = 'eth0'\nOMP_NUM_THREADS = 4\nEMPTY = ''\n"
    )
    found = settled(folder)
    assert {key: each.value for key, each in found.variables.items()} == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "4",
        "EMPTY": "",
    }
    source = f"{folder / name} ({prefix}env.GLOO_SOCKET_IFNAME)"
    assert found.variables["GLOO_SOCKET_IFNAME"] == Setting("eth0", source, Level.FILE)
    assert found.describe()[len(OPTIONS)] == ("env.GLOO_SOCKET_IFNAME", "eth0", source)
    assert found.as_json()["env.OMP_NUM_THREADS"]["value"] == "4"
    assert not found.role.is_set


@pytest.mark.parametrize("text", ["ib0", ""])
def test_a_variable_that_is_set_wins_over_the_file(folder: Path, text: str) -> None:
    (folder / OURS).write_text("[env]\nGLOO_SOCKET_IFNAME = 'eth0'\nA = '1'\n")
    found = settled(folder, environ={"GLOO_SOCKET_IFNAME": text})
    assert list(found.variables) == ["A"]


def test_only_the_nearest_file_has_variables(folder: Path) -> None:
    (folder.parent / OURS).write_text("[env]\nA = '1'\n")
    assert list(settled(folder).variables) == ["A"]
    (folder / OURS).write_text("[run]\n")
    assert settled(folder).variables == {}


VARIABLES_THAT_CANNOT_BE_MEANT = [
    ("[@env]\nA = true", "(@env.A) is True", 'write NAME = "text" or a whole number'),
    ("[@env]\nA = 1.5", "(@env.A) is 1.5", "whole number"),
    ("[@env]\nA = ['x']", "(@env.A) is ['x']", "whole number"),
    ("[@env.A]\nB = 1", "(@env.A) is {'B': 1}", "whole number"),
    ("[@env]\n'' = 'x'", "(@env.) is 'x'", "write NAME"),
    ("[@env]\n'A=B' = 'x'", "(@env.A=B) is 'x'", "write NAME"),
    ('[@env]\n"A\\u0000" = "x"', "is 'x'", "write NAME"),
    ('[@env]\nA = "x\\u0000"', "is 'x\\x00'", "write NAME"),
    ("@env = 3", "@env is 3, but must be a table", "write [@env]"),
]


def test_variables_that_cannot_be_meant(folder: Path) -> None:
    _assert_refused(folder, OURS, VARIABLES_THAT_CANNOT_BE_MEANT)
    (folder / OURS).unlink()
    _assert_refused(folder, PYPROJECT, VARIABLES_THAT_CANNOT_BE_MEANT[:1])


# What several options say together ------------------------------------------------------------------------

CLI, ENV, FILE = Level.COMMAND_LINE, Level.ENVIRONMENT, Level.FILE


def settled_from(folder: Path, *said: tuple[Level, str, str]) -> Settings:
    """The settings from (level, name, text); in the file, numbers and switches go without quotes."""
    arguments: dict[str, str | None] = {name: text for level, name, text in said if level is CLI}
    environ = {BY_NAME[name].variable: text for level, name, text in said if level is ENV}
    bare = {"master_port", "node_rank", "join_timeout", "standalone"}
    lines = [
        f"{name} = {text if name in bare else repr(text)}" for level, name, text in said if level is FILE
    ]
    (folder / OURS).write_text("\n".join(["[run]", *lines]))
    return settled(folder, arguments, environ)


ENDPOINTS: list[tuple[list[tuple[Level, str, str]], str, str]] = [
    ([(CLI, "master_addr", "a")], "a:29500", "command line (--master-addr)"),
    ([(ENV, "master_addr", "::1")], "[::1]:29500", "environment (PET_MASTER_ADDR)"),
    ([(CLI, "master_port", "7")], "127.0.0.1:7", "command line (--master-port)"),
    ([(CLI, "master_addr", "a"), (CLI, "master_port", "7")], "a:7", "command line (--master-addr)"),
    ([(FILE, "master_addr", "a"), (ENV, "master_port", "7")], "a:7", "environment (PET_MASTER_PORT)"),
    (
        [(CLI, "master_addr", "a"), (CLI, "rdzv_endpoint", "b")],
        "b:29400",
        "command line (--rdzv-endpoint)",
    ),
    (
        [(ENV, "master_addr", "a"), (CLI, "rdzv_endpoint", "b")],
        "b:29400",
        "command line (--rdzv-endpoint)",
    ),
    ([(CLI, "master_addr", "a"), (ENV, "rdzv_endpoint", "b")], "a:29500", "command line (--master-addr)"),
    (
        [(ENV, "master_addr", "a"), (FILE, "rdzv_endpoint", "b")],
        "a:29500",
        "environment (PET_MASTER_ADDR)",
    ),
    ([(ENV, "master_addr", "a"), (CLI, "rdzv_endpoint", "")], "", "command line (--rdzv-endpoint)"),
    ([(CLI, "standalone", "true")], "", "command line (--standalone)"),
    ([(CLI, "standalone", "true"), (ENV, "rdzv_endpoint", "b")], "", "command line (--standalone)"),
    ([(ENV, "standalone", "1"), (FILE, "master_addr", "b")], "", "environment (PET_STANDALONE)"),
    (
        [(CLI, "standalone", "0"), (ENV, "rdzv_endpoint", "b")],
        "b:29400",
        "environment (PET_RDZV_ENDPOINT)",
    ),
    (
        [(FILE, "standalone", "true"), (ENV, "rdzv_endpoint", "b:1")],
        "b:1",
        "environment (PET_RDZV_ENDPOINT)",
    ),
    ([(CLI, "standalone", "1"), (CLI, "rdzv_endpoint", "")], "", "command line (--standalone)"),
]


def test_the_endpoint_by_the_highest_source(folder: Path) -> None:
    for said, endpoint, source in ENDPOINTS:
        result = settled_from(folder, *said).rdzv_endpoint
        assert (result.text, result.source, result.is_set) == (endpoint, source, True), said


IN_RDZV_CONF: list[tuple[list[tuple[Level, str, str]], int | None, float]] = [
    ([(CLI, "rdzv_conf", "rank=0,join_timeout=5")], 0, 5.0),
    ([(CLI, "rdzv_conf", "rank=0"), (ENV, "node_rank", "7")], 0, 600.0),
    ([(ENV, "rdzv_conf", "join_timeout=5"), (CLI, "join_timeout", "6")], None, 6.0),
    ([(FILE, "rdzv_conf", "join_timeout=5"), (ENV, "join_timeout", "6")], None, 6.0),
    ([(CLI, "rdzv_conf", "join_timeout=5"), (CLI, "join_timeout", "5.0")], None, 5.0),
    ([(CLI, "rdzv_conf", "x=5"), (FILE, "join_timeout", "6")], None, 6.0),
]


def test_rdzv_conf_may_say_rank_and_join_timeout(folder: Path) -> None:
    for said, node_rank, join_timeout in IN_RDZV_CONF:
        result = settled_from(folder, *said)
        assert (result.node_rank.value, result.join_timeout.value) == (node_rank, join_timeout), said


CONTRADICTIONS = [
    ({"nnodes": "2"}, "nnodes is 2 by command line (--nnodes), but nothing says", "--rdzv-endpoint HOST"),
    ({"nnodes": "1:2"}, "nnodes is 1:2", "--rdzv-endpoint"),
    ({"nnodes": "2", "master_port": "7"}, "nothing says where the machines meet", "--rdzv-endpoint"),
    ({"nnodes": "2", "standalone": "1"}, "nothing says where the machines meet", "--rdzv-endpoint"),
    ({"node_rank": "1"}, "node_rank is 1 by command line (--node-rank), but nnodes is 1", "from 0 to 0"),
    ({"node_rank": "4", "nnodes": "2:4", "rdzv_endpoint": "a"}, "nnodes is 2:4", "from 0 to 3"),
    ({"rdzv_conf": "rank=1"}, "node_rank is 1 by command line (--rdzv-conf)", "from 0 to 0"),
    (
        {"rdzv_conf": "rank=x"},
        "command line (--rdzv-conf), rank: node_rank cannot be 'x'",
        "whole number",
    ),
    ({"rdzv_conf": "join_timeout=5", "join_timeout": "6"}, "join_timeout is 6 by", "leave out one"),
    ({"standalone": "1", "rdzv_endpoint": "a"}, "there is a:29400 as well", "leave out one"),
    ({"standalone": "1", "master_addr": "a"}, "there is a:29500 as well", "leave out one"),
]


def test_contradictions(folder: Path) -> None:
    for arguments, message, hint in CONTRADICTIONS:
        error = refusal(lambda: settled(folder, arguments), arguments)  # noqa: B023
        assert message in error.message, arguments
        assert hint in error.hint, arguments


TOGETHER = [
    {"nnodes": "1:4", "node_rank": "3", "rdzv_endpoint": "head"},
    {"nnodes": "2", "master_addr": "head"},
    {"nnodes": "2", "master_addr": "head", "master_port": "7"},
    {"nnodes": "1", "rdzv_endpoint": "head"},
]


def test_what_goes_together(folder: Path) -> None:
    for arguments in TOGETHER:
        settled(folder, arguments)


# Shown ----------------------------------------------------------------------------------------------------


def test_rows_to_print(folder: Path) -> None:
    arguments = {"nnodes": "1:2", "rdzv_endpoint": "[::1]", "rdzv_conf": "a=1,b=2"}
    rows = {name: (value, source) for name, value, source in settled(folder, arguments).describe()}
    assert list(rows) == [option.name for option in OPTIONS]
    assert rows["nnodes"] == ("1:2", "command line (--nnodes)")
    assert rows["rdzv_endpoint"][0] == "[::1]:29400"
    assert rows["rdzv_conf"][0] == "a=1,b=2"
    assert rows["rdzv_id"] == rows["local_ranks_filter"] == ("(none)", "built-in")
    assert [rows[name][0] for name in ("monitor_interval", "join_timeout", "standalone", "max_restarts")] == [
        *("0.1", "600", "false", "0")
    ]


def test_json(folder: Path) -> None:
    arguments = {"nnodes": "1:2", "rdzv_endpoint": "head", "rdzv_conf": "a=1"}
    document = json.loads(json.dumps(settled(folder, arguments, {"PET_TEE": "3"}).as_json()))
    assert list(document) == [option.name for option in OPTIONS]
    assert document["nnodes"] == {"value": "1:2", "source": "command line (--nnodes)"}
    assert document["tee"] == {"value": "3", "source": "environment (PET_TEE)"}
    values = {name: each["value"] for name, each in document.items()}
    assert values["rdzv_endpoint"] == "head:29400"
    assert values["rdzv_conf"] == {"a": "1"}
    assert (values["node_rank"], values["standalone"], values["join_timeout"]) == (None, False, 600.0)


# The command line -----------------------------------------------------------------------------------------


LINES = [
    ("train.py", Order({}, TRAIN)),
    (
        "train.py --lr 1 --nnodes 2 -h",
        Order({}, Target("script", ("train.py", "--lr", "1", "--nnodes", "2", "-h"))),
    ),
    ("--nnodes 2 train.py", Order({"nnodes": "2"}, TRAIN)),
    ("--nnodes=2 train.py", Order({"nnodes": "2"}, TRAIN)),
    ("--nproc-per-node 2 train.py", Order({"nproc_per_node": "2"}, TRAIN)),
    ("--nproc_per_node=2 train.py", Order({"nproc_per_node": "2"}, TRAIN)),
    ("--rdzv_conf=a=1,b=2 train.py", Order({"rdzv_conf": "a=1,b=2"}, TRAIN)),
    ("--rdzv-id=a_b train.py", Order({"rdzv_id": "a_b"}, TRAIN)),
    ("--rdzv-endpoint= train.py", Order({"rdzv_endpoint": ""}, TRAIN)),
    ("--log-dir=-x train.py", Order({"log_dir": "-x"}, TRAIN)),
    ("--nnodes 1 --nnodes 2 train.py", Order({"nnodes": "2"}, TRAIN)),
    ("-t 3 -r 1 train.py", Order({"tee": "3", "redirects": "1"}, TRAIN)),
    ("-t3 -r=0:1 train.py", Order({"tee": "3", "redirects": "0:1"}, TRAIN)),
    ("--standalone train.py", Order({"standalone": "true"}, TRAIN)),
    ("--rdzv-backend=rallypoint train.py", Order({}, TRAIN)),
    ("--rdzv_backend rallypoint train.py", Order({}, TRAIN)),
    ("-m pkg.train -m x", Order({}, Target("module", ("pkg.train", "-m", "x")))),
    ("--module pkg.train", Order({}, Target("module", ("pkg.train",)))),
    ("-m --nnodes 2 pkg.train", Order({"nnodes": "2"}, Target("module", ("pkg.train",)))),
    ("-- torchrun --nnodes 2 x.py", Order({}, Target("command", ("torchrun", "--nnodes", "2", "x.py")))),
    ("--patch always -- -- a", Order({"patch": "always"}, Target("command", ("--", "a")))),
    ("- x", Order({}, Target("script", ("-", "x")))),
    ("train.py -- x", Order({}, Target("script", ("train.py", "--", "x")))),
    ("--show-config", Order(show_config=True)),
    ("--show_config --json --tee 1", Order({"tee": "1"}, show_config=True, json=True)),
    ("--show-config train.py", Order({}, TRAIN, show_config=True)),
    ("-m --show-config", Order(show_config=True)),
    ("--help --no-such", Order(help=True)),
    ("--nnodes 2 -h", Order(help=True)),
]


def test_command_lines() -> None:
    for line, expected in LINES:
        assert split_arguments(line.split()) == expected, line


def test_every_option_in_both_spellings_with_and_without_a_blank() -> None:
    for option in OPTIONS:
        expected = {option.name: "x" if option.takes_value else "true"}
        for flag in (option.flag, f"--{option.name}", *([option.short] if option.short else [])):
            for line in [[flag, "x"], [f"{flag}=x"]] if option.takes_value else [[flag]]:
                assert split_arguments([*line, "train.py"]) == Order(expected, TRAIN), line


WRONG_LINES: list[tuple[list[str], str, str]] = [
    ([], "there is no script to start", "rallypoint run [options] script.py"),
    (["--nnodes", "2"], "there is no script to start", "script.py"),
    ([""], "there is no script to start", "script.py"),
    (["--json"], "there is no script", "script.py"),
    (["-m"], "there is no module to start", "-m module"),
    (["--"], "there is no command behind --", "-- command"),
    (["--", ""], "there is no command behind --", "-- command"),
    (["-m", "--", "x"], "both -m and a command", "-m module"),
    (["-m", "train.py"], "-m takes a module, but train.py is a script", "leave out -m"),
    (["-m", "pkg/train"], "-m takes a module, but pkg/train is a script", "leave out -m"),
    (["--nnode", "2", "x.py"], "there is no option --nnode", "did you mean --nnodes?"),
    (["--nproc=2", "x.py"], "there is no option --nproc", "did you mean --nproc-per-node?"),
    (["-nnodes=2", "x.py"], "there is no option -nnodes", "did you mean --nnodes?"),
    (["--nproc_per_nodes", "2"], "no option --nproc_per_nodes", "did you mean --nproc-per-node?"),
    (["--show-conf"], "no option --show-conf", "did you mean --show-config?"),
    (["--qqqq"], "there is no option --qqqq", "known: --nnodes, --nproc-per-node"),
    (["-q"], "there is no option -q", "known: --nnodes"),
    (["-_nnodes=2", "x.py"], "there is no option -_nnodes", "did you mean --nnodes?"),
    (["--no-python", "x"], "there is no option --no-python", "torchrun's: use it with rallypoint run --"),
    (["--numa_binding=node", "x"], "no option --numa_binding", "--numa-binding is torchrun's"),
    (["--nnodes"], "--nnodes needs a value", "--nnodes VALUE"),
    (["--nnodes", "--tee", "3", "x.py"], "--nnodes needs a value", "--nnodes=VALUE"),
    (["--nnodes", "--", "x"], "--nnodes needs a value", "--nnodes=VALUE"),
    (["-t"], "-t needs a value", "-t VALUE"),
    (["--standalone=1", "x.py"], "--standalone takes no value", "by itself"),
    (["-mpkg"], "-m takes no value, but -mpkg gives it one", "by itself"),
    (
        ["--rdzv-backend", "c10d", "x.py"],
        "--rdzv-backend is 'c10d'",
        "run -- torchrun --rdzv-backend=c10d",
    ),
    (["--rdzv_backend=", "x.py"], "--rdzv-backend is ''", "leave it out"),
]


def test_command_lines_that_cannot_be_meant() -> None:
    for line, message, hint in WRONG_LINES:
        error = refusal(lambda: split_arguments(line), line)  # noqa: B023
        assert message in error.message, line
        assert hint in error.hint, line


def test_an_option_that_torchrun_alone_has_is_none_of_ours() -> None:
    theirs = {action.dest for action in get_args_parser()._actions} - {
        "training_script",
        "training_script_args",
    }
    ours = {option.name for option in OPTIONS} | {flag.name for flag in FLAGS}
    assert theirs - ours == TORCHRUN_ONLY


WORDS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["--", "-", "", "-m", "-h", "--help", "--nnodes", "--nnodes=2", "-t3", "--no-such", "a b"]
    ),
)
PREFIX = st.lists(
    st.sampled_from(
        [["--nnodes", "2"], ["--nproc_per_node=4"], ["--standalone"], ["-t", "3"], ["--json"], ["-r1"]]
    )
).map(lambda options: [word for option in options for word in option])
MODES = st.sampled_from(
    [([], "script", "train.py"), (["-m"], "module", "pkg.train"), (["--"], "command", "-x")]
)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(PREFIX, MODES, st.lists(WORDS, max_size=6))
@example([], ([], "script", "train.py"), ["--", "--nnodes=3"])
def test_what_stands_behind_the_target_is_untouched(
    prefix: list[str], mode: tuple[list[str], str, str], rest: list[str]
) -> None:
    how, kind, first = mode
    order = split_arguments([*prefix, *how, first, *rest])
    assert order.target is not None
    assert (order.target.kind, order.target.words) == (kind, (first, *rest))
    assert order.options == (split_arguments([*prefix, "x.py"]).options)


# torchrun -------------------------------------------------------------------------------------------------


TORCHRUN_ENDPOINTS: list[tuple[dict[str, str], str]] = [
    ({}, "localhost:0"),
    ({"standalone": "true"}, "localhost:0"),
    ({"rdzv_endpoint": "head"}, "head:29400"),
    ({"master_addr": "::1", "master_port": "7"}, "[::1]:7"),
]


def test_torchrun_gets_an_endpoint(folder: Path) -> None:
    for arguments, endpoint in TORCHRUN_ENDPOINTS:
        words = to_torchrun(settled(folder, arguments), TRAIN, 1)
        assert words[1] == f"--rdzv-endpoint={endpoint}", arguments


TORCHRUN_OPTIONS: list[tuple[dict[str, str], int | str, list[str]]] = [
    ({}, 1, []),
    ({}, 8, ["--nproc-per-node=8"]),
    ({"nproc_per_node": "1"}, 1, ["--nproc-per-node=1"]),
    ({"nproc_per_node": "gpu"}, "gpu", ["--nproc-per-node=gpu"]),
    ({"nnodes": "1"}, 1, ["--nnodes=1"]),
    ({"nnodes": "1:4", "rdzv_endpoint": "head"}, 1, ["--nnodes=1:4"]),
    ({"rdzv_id": "a b"}, 1, ["--rdzv-id=a b"]),
    ({"max_restarts": "3", "monitor_interval": "2"}, 1, ["--max-restarts=3", "--monitor-interval=2"]),
    ({"start_method": "fork", "role": "r"}, 1, ["--start-method=fork", "--role=r"]),
    ({"local_addr": "n", "log_dir": "-l"}, 1, ["--local-addr=n", "--log-dir=-l"]),
    ({"tee": "3", "redirects": "1"}, 1, ["--redirects=1", "--tee=3"]),
    ({"local_ranks_filter": "0,1"}, 1, ["--local-ranks-filter=0,1"]),
    ({"patch": "never", "client": "python", "use_libuv": "0"}, 1, []),
]


def test_torchrun_gets_what_was_set(folder: Path) -> None:
    for arguments, ranks, expected in TORCHRUN_OPTIONS:
        words = to_torchrun(settled(folder, arguments), TRAIN, ranks)
        backend, _, conf, *given_on = words[: words.index("--")]
        assert (backend, conf) == ("--rdzv-backend=rallypoint", "--rdzv-conf=join_timeout=600")
        assert given_on == expected, arguments


TORCHRUN_CONF: list[tuple[list[tuple[Level, str, str]], dict[str, str]]] = [
    ([(CLI, "join_timeout", "0.5")], {"join_timeout": "0.5"}),
    ([(CLI, "node_rank", "0")], {"join_timeout": "600", "rank": "0"}),
    ([(CLI, "relay", "off")], {"join_timeout": "600", "relay": "off"}),
    ([(CLI, "rdzv_conf", "a=1,join_timeout=5")], {"a": "1", "join_timeout": "5"}),
    ([(CLI, "rdzv_conf", "rank=0,a=1")], {"a": "1", "join_timeout": "600", "rank": "0"}),
    (
        [(ENV, "rdzv_conf", "join_timeout=5,a=1"), (CLI, "join_timeout", "6")],
        {"a": "1", "join_timeout": "6"},
    ),
]


def test_torchrun_gets_rank_and_join_timeout_with_the_settings_of_the_rendezvous(folder: Path) -> None:
    for said, expected in TORCHRUN_CONF:
        conf = to_torchrun(settled_from(folder, *said), TRAIN, 1)[2].removeprefix("--rdzv-conf=")
        assert dict(pair.split("=") for pair in conf.split(",")) == expected, said


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.booleans(), st.lists(WORDS, max_size=6))
@example(False, ["--", "x"])
def test_torchruns_own_parser_leaves_the_arguments_alone(as_module: bool, rest: list[str]) -> None:
    target = Target("module", ("pkg.train", *rest)) if as_module else Target("script", ("train.py", *rest))
    parsed = get_args_parser().parse_args(to_torchrun(NOTHING_SAID, target, 2))
    assert (parsed.training_script, *parsed.training_script_args) == target.words
    assert (parsed.module, parsed.nproc_per_node, parsed.rdzv_backend) == (as_module, "2", "rallypoint")


NOTHING_SAID = Settings(**{option.name: Setting(option.default) for option in OPTIONS})  # type: ignore[arg-type]


def test_what_is_left_to_torchrun_has_the_same_value_there() -> None:
    parsed = get_args_parser().parse_args(["train.py"])
    for name in ("max_restarts", "monitor_interval", "start_method", "role", "local_addr", "log_dir"):
        assert getattr(parsed, name) == BY_NAME[name].default, name
    for name in ("rdzv_endpoint", "redirects", "tee", "local_ranks_filter"):
        assert getattr(parsed, name) == text_of(BY_NAME[name].default), name
    assert (parsed.nnodes, parsed.nproc_per_node) == ("1:1", "1")


def test_torchrun_starts_no_command() -> None:
    with pytest.raises(ValueError, match="not a command"):
        to_torchrun(NOTHING_SAID, Target("command", ("true",)), 1)


def test_torchrun_does_not_see_the_variables_that_are_settled() -> None:
    settled_ones = {option.variable: "" for option in OPTIONS if option.name not in OWN_VARIABLES}
    flags = {"PET_MODULE": "1", "PET_NO_PYTHON": "1", "PET_RUN_PATH": "1", "PET_RDZV_BACKEND": "c10d"}
    kept = {"PATH": "/bin", "USE_LIBUV": "0", "RALLYPOINT_PATCH": "auto", "PET_SHUTDOWN_TIMEOUT": "5"}
    assert torchrun_environment({**settled_ones, **flags, **kept}) == kept
