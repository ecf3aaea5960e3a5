"""Adding settings to a rallypoint.toml: a new file or a new table; else the lines that are to be put in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rallypoint.errors import UsageError
from rallypoint.launch.config import settle
from rallypoint.launch.toml_edit import plan_amendment

REMARK = "  # by rallypoint doctor --fix"
GLOO = {"env": {"GLOO_SOCKET_IFNAME": "eth0"}}
GLOO_LINES = f'[env]\nGLOO_SOCKET_IFNAME = "eth0"{REMARK}\n'

WHOLE: list[tuple[str | None, str]] = [
    (None, GLOO_LINES),
    ("", GLOO_LINES),
    ("# mine", f"# mine\n\n{GLOO_LINES}"),
    ("[run]\nrdzv_id = '1'\n", f"[run]\nrdzv_id = '1'\n\n{GLOO_LINES}"),
    ("\ufeff[run]\n", f"\ufeff[run]\n\n{GLOO_LINES}"),  # a mark of some editors
]


@pytest.mark.parametrize(("before", "after"), WHOLE)
def test_a_new_file_or_a_new_table_at_the_end(before: str | None, after: str, tmp_path: Path) -> None:
    path = tmp_path.resolve() / "rallypoint.toml"
    if before is not None:
        path.write_text(before, encoding="utf-8")
    plan_amendment(tmp_path, GLOO).write()
    assert path.read_text(encoding="utf-8") == after
    assert settle({}, {}, tmp_path).variables["GLOO_SOCKET_IFNAME"].value == "eth0"
    assert not plan_amendment(tmp_path, GLOO).added, "it is there now"


def test_several_tables_and_keys(tmp_path: Path) -> None:
    additions = {"run": {"client": "python", "rdzv-endpoint": "a:1"}, "env": {"A": 'say "x" \\ ü'}}
    amendment = plan_amendment(tmp_path, additions)
    assert list(tmp_path.iterdir()) == [], "a plan writes nothing"
    amendment.write()
    found = settle({}, {}, tmp_path)
    assert (found.client.text, found.rdzv_endpoint.text) == ("python", "a:1")
    assert found.variables["A"].value == 'say "x" \\ ü'
    assert amendment.after.count(REMARK) == 3


SET_ALREADY: list[tuple[str, Mapping[str, Mapping[str, str]]]] = [
    ('[env]\nGLOO_SOCKET_IFNAME = "ib0"\n', GLOO),
    ('env = {GLOO_SOCKET_IFNAME = "ib0"}\n', GLOO),
    ('[run]\nrdzv_endpoint = "b:2"\n', {"run": {"rdzv-endpoint": "a:1"}}),
]


def test_what_is_set_already_stays(tmp_path: Path) -> None:
    for before, additions in SET_ALREADY:
        (tmp_path / "rallypoint.toml").write_text(before)
        amendment = plan_amendment(tmp_path, additions)
        assert (amendment.after, amendment.added) == (before, ())


@pytest.mark.parametrize(
    ("name", "text", "table"),
    [
        ("rallypoint.toml", '[env]\nA = "1"\n', "[env]"),
        ("rallypoint.toml", 'env.A = "1"\n', "[env]"),
        ("pyproject.toml", "[tool.rallypoint.run]\n", "[tool.rallypoint.env]"),
    ],
)
def test_a_table_that_is_there_is_not_edited_but_it_is_said_what_belongs_there(
    name: str, text: str, table: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match="is not edited") as caught:
        plan_amendment(tmp_path, GLOO)
    assert caught.value.hint == f'put in: GLOO_SOCKET_IFNAME = "eth0" below {table}'


def test_the_file_of_a_folder_above_is_the_one_that_counts(tmp_path: Path) -> None:
    (tmp_path / "rallypoint.toml").write_text("[run]\n")
    below = tmp_path / "below"
    below.mkdir()
    assert plan_amendment(below, GLOO).path == tmp_path.resolve() / "rallypoint.toml"
