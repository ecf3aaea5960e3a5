"""Adding settings to a rallypoint.toml: the additions are there, and all else is as it was, to the letter."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rallypoint.errors import UsageError
from rallypoint.launch.config import settle
from rallypoint.launch.toml_edit import Amendment, plan_amendment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REMARK = "  # by rallypoint doctor --fix"
GLOO = {"env": {"GLOO_SOCKET_IFNAME": "eth0"}}
GLOO_LINE = f'GLOO_SOCKET_IFNAME = "eth0"{REMARK}\n'


def plan(folder: Path, before: str | None, additions: Mapping[str, Mapping[str, str]] = GLOO) -> Amendment:
    if before is not None:
        (folder / "rallypoint.toml").write_bytes(before.encode())
    return plan_amendment(folder, additions)


PLACES: list[tuple[str | None, str]] = [
    (None, f"[env]\n{GLOO_LINE}"),
    ("", f"[env]\n{GLOO_LINE}"),
    ("# mine\n", f"# mine\n\n[env]\n{GLOO_LINE}"),
    ("# mine", f"# mine\n\n[env]\n{GLOO_LINE}"),
    ("[run]\nnnodes = 1\n", f"[run]\nnnodes = 1\n\n[env]\n{GLOO_LINE}"),
    ("[env]", f"[env]\n{GLOO_LINE}"),
    ("[env]\n", f"[env]\n{GLOO_LINE}"),
    ('[env]\nA = "1" # why\n[run]\n', f'[env]\n{GLOO_LINE}A = "1" # why\n[run]\n'),
    ("[ env ]  # ours\nA = 1\n", f"[ env ]  # ours\n{GLOO_LINE}A = 1\n"),
    ("[environment]\n", f"[environment]\n\n[env]\n{GLOO_LINE}"),
    ('x = "[env]"\n', f'x = "[env]"\n\n[env]\n{GLOO_LINE}'),
]


def test_where_a_line_goes(tmp_path: Path) -> None:
    for before, after in PLACES:
        amendment = plan(tmp_path, before)
        assert (amendment.after, amendment.before) == (after, before)
        assert amendment.path == tmp_path.resolve() / "rallypoint.toml"
        assert amendment.added


def test_several_tables_and_keys(tmp_path: Path) -> None:
    additions = {"run": {"client": "python", "rdzv_endpoint": "a:1"}, "env": {"A": 'say "x" \\ ü'}}
    amendment = plan(tmp_path, "[env]\nB = 1\n", additions)
    assert tomllib.loads(amendment.after) == {**additions, "env": {"A": 'say "x" \\ ü', "B": 1}}
    assert amendment.after.count(REMARK) == 3


SET_ALREADY: list[tuple[str, dict[str, dict[str, str]]]] = [
    ('[env]\nGLOO_SOCKET_IFNAME = "ib0"\n', GLOO),
    ('env.GLOO_SOCKET_IFNAME = "ib0"\n', GLOO),
    ('env = {GLOO_SOCKET_IFNAME = "ib0"}\n', GLOO),
    ('[run]\nrdzv-endpoint = "b:2"\n', {"run": {"rdzv_endpoint": "a:1"}}),
    ('[run]\nrdzv_endpoint = "b:2"\n', {"run": {"rdzv_endpoint": "a:1"}}),
    ('[run]\nrdzv_endpoint = "b:2"\n', {"run": {"rdzv-endpoint": "a:1"}}),
    ("# nothing to add\n", {}),
]


def test_what_is_set_already_stays(tmp_path: Path) -> None:
    for before, additions in SET_ALREADY:
        amendment = plan(tmp_path, before, additions)
        assert amendment.after == before
        assert not amendment.added, before


LAYOUTS = [
    'env = {A = "1"}\n',
    'env.A = "1"\n',
    '["env"]\n',
    "  [env]\n",
    "[[env]]\n",
    'env = "x"\n',
    "env = 3\n",
    '[run]\nx = """\n[env]\n"""\n',
]


def test_a_layout_that_cannot_be_added_to_is_refused(tmp_path: Path) -> None:
    for before in LAYOUTS:
        with pytest.raises(UsageError, match="is laid out in a way that cannot be added to") as caught:
            plan(tmp_path, before)
        assert caught.value.hint == 'put in yourself: env.GLOO_SOCKET_IFNAME = "eth0"'
        assert (tmp_path / "rallypoint.toml").read_bytes() == before.encode()


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not valid TOML"):
        plan(tmp_path, "[env\n")


def test_a_pyproject_is_not_changed_but_it_is_said_what_belongs_there(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.rallypoint.run]\n")
    with pytest.raises(UsageError, match=r"pyproject\.toml, which is not changed here") as caught:
        plan_amendment(tmp_path, GLOO)
    assert caught.value.hint == 'put in: GLOO_SOCKET_IFNAME = "eth0" in [tool.rallypoint.env]'


def test_a_pyproject_that_is_not_about_us_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.other]\n")
    assert plan_amendment(tmp_path, GLOO).path == tmp_path.resolve() / "rallypoint.toml"


def test_the_file_of_a_folder_above_is_the_one_that_counts(tmp_path: Path) -> None:
    (tmp_path / "rallypoint.toml").write_text("[env]\n")
    below = tmp_path / "below"
    below.mkdir()
    assert plan_amendment(below, GLOO).path == tmp_path.resolve() / "rallypoint.toml"


def test_a_new_file_and_back(tmp_path: Path) -> None:
    amendment = plan(tmp_path, None)
    assert list(tmp_path.iterdir()) == [], "a plan writes nothing"
    amendment.write()
    assert [each.name for each in tmp_path.iterdir()] == ["rallypoint.toml"]
    assert amendment.undo == f"delete {amendment.path}"
    assert settle({}, {}, tmp_path).variables["GLOO_SOCKET_IFNAME"].value == "eth0"
    assert not plan_amendment(tmp_path, GLOO).added


@pytest.mark.parametrize("before", ["[run]\r\nnnodes = 1\r\n", "# ü\n"])
def test_a_file_that_was_there_and_back(before: str, tmp_path: Path) -> None:
    amendment = plan(tmp_path, before)
    amendment.write()
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"rallypoint.toml", "rallypoint.toml.before-doctor"}
    assert amendment.undo == f"put {amendment.backup} back in the place of {amendment.path}"
    assert settle({}, {}, tmp_path).variables["GLOO_SOCKET_IFNAME"].value == "eth0"
    amendment.backup.replace(amendment.path)
    assert amendment.path.read_bytes() == before.encode(), "undone to the byte"


def test_lines_that_end_as_on_windows_stay_as_they_are(tmp_path: Path) -> None:
    plan(tmp_path, "# mine\r\n[env]\r\nA = 1\r\n").write()
    written = (tmp_path / "rallypoint.toml").read_bytes()
    assert written.startswith(b"# mine\r\n[env]\r\n")
    assert written.endswith(b"A = 1\r\n")


def test_added_lines_end_as_the_others_do(tmp_path: Path) -> None:
    plan(tmp_path, "[run]\r\nnnodes = 1\r\n", {**GLOO, "run": {"client": "python"}}).write()
    written = (tmp_path / "rallypoint.toml").read_bytes()
    assert written.count(b"\n") == written.count(b"\r\n") == 6


@pytest.mark.parametrize("table", ["run", "env"])
def test_a_byte_order_mark_stays(table: str, tmp_path: Path) -> None:
    """Some editors begin a file with one, and `rallypoint run` reads it."""
    text = {"run": "[run]\nnnodes = 1\n", "env": '[env]\nA = "1"\n'}[table]
    plan(tmp_path, "\ufeff" + text).write()
    assert settle({}, {}, tmp_path).variables["GLOO_SOCKET_IFNAME"].value == "eth0"
    assert (tmp_path / "rallypoint.toml").read_bytes().startswith(f"\ufeff[{table}]\n".encode())


def test_the_first_backup_is_kept(tmp_path: Path) -> None:
    """What is to be undone is all that was ever added."""
    before = "# mine\n"
    plan(tmp_path, before).write()
    second = plan_amendment(tmp_path, {"run": {"client": "python"}})
    second.write()
    assert second.backup.read_text() == before
    assert settle({}, {}, tmp_path).client.value == "python"


def test_a_link_is_followed_and_stays_one(tmp_path: Path) -> None:
    """People keep their settings elsewhere, under version control."""
    real = tmp_path / "elsewhere" / "settings.toml"
    real.parent.mkdir()
    real.write_text("[run]\nnnodes = 1\n")
    link = tmp_path / "rallypoint.toml"
    link.symlink_to(real)
    plan_amendment(tmp_path, GLOO).write()
    assert link.is_symlink()
    assert "GLOO_SOCKET_IFNAME" in real.read_text()
    assert [each.name for each in real.parent.iterdir()] == ["settings.toml"]


@pytest.mark.skipif(sys.platform == "win32", reason="modes are another thing there")
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_mode_of_a_file_stays(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "rallypoint.toml"
    path.write_text("[env]\n")
    path.chmod(mode)
    plan_amendment(tmp_path, GLOO).write()
    assert path.stat().st_mode & 0o777 == mode


def test_a_file_that_cannot_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    amendment = plan(tmp_path, "[run]\n")
    (tmp_path / "rallypoint.toml.draft").mkdir()
    with pytest.raises(OSError, match="draft"):
        amendment.write()
    assert (tmp_path / "rallypoint.toml").read_text() == "[run]\n"


# Any small file --------------------------------------------------------------------------------------------

words = st.from_regex(r"[A-Z][A-Z_]{0,6}", fullmatch=True)
values = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
lines = st.one_of(
    st.builds(lambda key, value: f"{key} = {value}", words, st.integers(0, 9)),
    st.builds(lambda key: f"{key} = 'text'  # why", words),
    st.builds(lambda text: f"# {text}", st.from_regex(r"[a-z\[\]=]{0,8}", fullmatch=True)),
    st.just(""),
)
tables = st.sampled_from(["env", "run", "other", "env.sub"])


@st.composite
def files(draw: st.DrawFn) -> str:
    """A file as people write them; its tables come in any order, each at most once."""
    marks, few = st.sampled_from(["", " ", "  # ours"]), st.lists(lines, max_size=3)
    parts = draw(few)
    for table in draw(st.lists(tables, unique=True, max_size=4)):
        parts += [f"[{table}]{draw(marks)}", *draw(few)]
    return "\n".join(parts) + draw(st.sampled_from(["", "\n"]))


def is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


additions = st.dictionaries(
    st.sampled_from(["env", "run"]), st.dictionaries(words, values, max_size=3), max_size=2
)


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
)
@given(files().filter(is_toml), additions)
def test_of_any_file_nothing_is_lost(tmp_path: Path, before: str, added: dict[str, dict[str, str]]) -> None:
    amendment = plan(tmp_path, before, added)
    old, new = tomllib.loads(before), tomllib.loads(amendment.after)
    for table in {*old, *added}:
        if table in added:
            assert new.get(table, {}) == {**added[table], **old.get(table, {})}
        else:
            assert new[table] == old[table]
    kept = [line for line in amendment.after.splitlines() if not line.endswith(REMARK)]
    rest = iter(kept)
    assert all(line in rest for line in before.splitlines()), "every line is there, in the old order"
    assert not plan(tmp_path, amendment.after, added).added
