"""Which files of settings are obeyed: none that another user may have written."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from command_line import invoke
from rallypoint.errors import UsageError
from rallypoint.launch import settings_file
from rallypoint.launch.config import settle
from rallypoint.launch.settings_file import doubt_about, read_file

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no owners and no modes there")

STRANGER = 54_321
OURS, PYPROJECT = "rallypoint.toml", "pyproject.toml"
TEXTS = {OURS: "[run]\ntee = {}\n", PYPROJECT: "[tool.rallypoint.run]\ntee = {}\n"}
ELSEWHERE = "copy it into a folder that only you may write"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    below = tmp_path.resolve() / "project" / "scripts"
    below.mkdir(parents=True)
    return below


def write(path: Path, tee: int = 1) -> Path:
    path.write_text(TEXTS[path.name].format(tee))
    return path


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file another user's. Only root can: elsewhere, this process is another user from now on."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_of_another_user_one_folder_up_is_not_used_but_named(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folder.parent / name)
    with path.open("a") as file:
        file.write("broken = \n")  # what is not used is not read, either
    give_away(path, monkeypatch)
    settings = settle({}, {}, folder)
    assert (settings.file, settings.passed_on, settings.variables) == (None, {}, {})
    [warning] = settings.warnings
    assert re.fullmatch(f"{path} is not used: {path} belongs to .+; to use it, {ELSEWHERE}", warning)


def test_the_search_goes_on_above_a_file_that_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / OURS).chmod(0o666)
    (folder / PYPROJECT).write_text("[tool.other]\n")
    (folder / PYPROJECT).chmod(0o666)  # it is not about us, so nobody wants to know
    used = write(folder.parent / PYPROJECT, 2)
    found = read_file(folder)
    assert (found.path, found.options["tee"].value, len(found.warnings)) == (used, 2, 1)


# What is changed, to which mode, and what is said about it.
MODES = [
    ("file", 0o646, "everybody may write {}; to use it: chmod go-w {}"),
    ("file", 0o664, "the group .+ may write {}; to use it: chmod go-w {}"),
    ("folder", 0o757, "everybody may write {}; to use it: chmod go-w {}"),
    ("folder", 0o775, "the group .+ may write {}; to use it: chmod go-w {}"),
    ("folder", 0o1777, f"everybody may write {{}}; to use it, {ELSEWHERE}"),
    ("file", 0o600, ""),
    ("folder", 0o1755, ""),
]


def test_nobody_else_may_write_the_file_or_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_file, "_is_private", lambda _: False)
    for what, mode, expected in MODES:
        path = write(folder / OURS)
        path.chmod(0o644)
        folder.chmod(0o755)
        changed = path if what == "file" else folder
        changed.chmod(mode)
        assert re.fullmatch(expected.format(changed, changed), doubt_about(path, folder)), (what, oct(mode))


def test_a_folder_of_another_user_is_no_place_for_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when root works in the folder of a user, by sudo: the user could replace the file."""
    path = write(folder / OURS)
    give_away(folder, monkeypatch)
    assert "belongs to" in doubt_about(path, folder)


def test_of_a_symbolic_link_the_file_that_is_meant_counts_and_both_folders(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "kept").mkdir()
    meant, link = write(folder / "kept" / OURS), folder / OURS
    link.symlink_to(meant)
    assert read_file(folder).path == link
    for changed in (folder, meant.parent, meant):
        changed.chmod(0o777)
        assert f"everybody may write {changed};" in doubt_about(link, folder)
        changed.chmod(0o755)
    give_away(meant, monkeypatch)
    assert f"{meant} belongs to" in doubt_about(link, folder)
    meant.unlink()
    assert read_file(folder).warnings == (), "a link that leads nowhere is no file"


def test_a_group_that_is_the_users_alone_is_nobody_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many systems give each user a group of the same name, and let it write."""
    import grp
    import pwd

    path = write(folder / OURS)
    path.chmod(0o664)
    gid = path.stat().st_gid
    ada = SimpleNamespace(pw_uid=1000, pw_gid=gid, pw_name="ada")
    for user, group, members, trusted in (
        (ada, "ada", [], True),
        (ada, "ada", ["ada"], True),
        (ada, "ada", ["ada", "bob"], False),
        (ada, "users", [], False),
        (SimpleNamespace(**{**vars(ada), "pw_gid": gid + 1}), "ada", [], False),
        (SimpleNamespace(**{**vars(ada), "pw_uid": 0}), "ada", [], False),
    ):
        found = SimpleNamespace(gr_name=group, gr_mem=members)
        with monkeypatch.context() as patch:
            patch.setattr(pwd, "getpwuid", lambda _, user=user: user)
            patch.setattr(grp, "getgrgid", lambda _, found=found: found)
            assert (doubt_about(path, folder) == "") == trusted, (user, group, members)


def test_where_files_have_no_owners_only_this_folder_and_the_home_folder_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, above = write(folder / OURS), write(folder.parent / OURS)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        patch.setattr(Path, "home", lambda: folder / "home")
        found = [doubt_about(each, folder) for each in (here, above)]
        patch.setattr(Path, "home", lambda: folder.parent)
        found.append(doubt_about(above, folder))
    assert found == ["", f"it is neither in {folder} nor in your home folder; to use it, {ELSEWHERE}", ""]


REFUSED = "LD_PRELOAD LD_AUDIT DYLD_INSERT_LIBRARIES PYTHONPATH PYTHONSTARTUP BASH_ENV ENV PATH Path ld_x"


def test_no_file_sets_which_code_programs_load(folder: Path) -> None:
    for name in REFUSED.split():
        (folder / OURS).write_text(f"[env]\n{name} = '/tmp/evil'\n")
        with pytest.raises(UsageError, match=rf"\(env.{name}\): no file may set {name}") as caught:
            settle({}, {}, folder)
        assert f"export {name}=" in caught.value.hint
    for text in ("[env]\nRALLYPOINT_SECRET = '5e5e'", "[run]\nsecret = '5e5e'"):
        (folder / OURS).write_text(text)
        with pytest.raises(UsageError, match="is no place for a secret") as caught:
            settle({}, {}, folder)
        assert "5e5e" not in str(caught.value)
    for like in ("PATHS", "MY_PATH", "OLD_PRELOAD", "ENVIRONMENT", "CPYTHON"):
        (folder / OURS).write_text(f"[env]\n{like} = 'x'\n")
        assert list(settle({}, {}, folder).variables) == [like]


def test_the_command_says_which_file_is_used_and_which_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / OURS).chmod(0o666)
    used = write(folder.parent / OURS)
    monkeypatch.chdir(folder)
    warning, said = invoke("run", "--show-config").stderr.splitlines()
    assert warning.startswith(f"rallypoint: warning: {folder / OURS} is not used: everybody may write")
    assert said == f"rallypoint: settings from {used}"
