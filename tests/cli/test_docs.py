"""The documentation: its examples run, its links lead somewhere, and its reference leaves nothing out.

An example is a fenced block. What a comment in the line before the fence says about it:

    <!-- not run: reason -->   it cannot run here
    <!-- file: train.py -->    a Python block that later shell blocks of the page find under that name
    <!-- output -->            a text block: what the example before it prints; ... stands for anything

Every other `python` block runs in an interpreter of its own, every `sh` block in a bash of its own, each in
an empty folder; 29500 becomes a free port. An example has to end what it starts in the background.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

import rallypoint
from command_line import invoke
from processes import free_port
from rallypoint import errors
from rallypoint.cli.command import Command, Group
from rallypoint.cli.main import COMMANDS
from rallypoint.launch.options import FLAGS, OPTIONS
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_PAGES = sorted([*_ROOT.glob("*.md"), *_DOCS.rglob("*.md")])
_REFERENCE = _DOCS / "reference"

_SECONDS = 180
_GOODBYE_SECONDS = 5
_PORT = "29500"


@dataclass
class Example:
    """A block that runs, the files it finds in its folder, and what it is to print."""

    page: Path
    line: int
    language: str
    code: str
    files: Mapping[str, str]
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(_ROOT)}:{self.line}"


@dataclass
class _Page:
    """The examples of a page, read block by block."""

    path: Path
    examples: list[Example] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def take(self, line: int, language: str, code: str, remark: str) -> None:
        kind, _, text = remark.partition(": ")
        if kind == "not run":
            assert text, f"{self.path}:{line} does not say why it is not run"
        elif kind == "file":
            self.files[text] = code
        elif kind == "output":
            assert self.examples, f"{self.path}:{line} is the output of nothing"
            self.examples[-1].output = code
        elif language in ("python", "sh"):
            self.examples.append(Example(self.path, line, language, code, dict(self.files)))


_BLOCK = re.compile(
    r"(?:^<!-- (?P<remark>[^\n]*) -->\n+)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def _examples() -> Iterator[Example]:
    for path in _PAGES:
        page = _Page(path)
        text = path.read_text()
        for block in _BLOCK.finditer(text):
            line = text.count("\n", 0, block.start("language")) + 1
            page.take(line, block["language"], block["code"], block["remark"] or "")
        yield from page.examples


_QUICK_PAGES = ("README.md", "docs/index.md", "docs/guides/first-store.md")
"""What everybody reads first; what the other pages show, other tests do as well."""


def _marked(example: Example) -> Any:
    quick = str(example.page.relative_to(_ROOT)) in _QUICK_PAGES
    marks = [] if quick else [pytest.mark.slow]
    return pytest.param(example, id=str(example), marks=marks)


@pytest.mark.parametrize("example", list(map(_marked, _examples())))
def test_example(example: Example, tmp_path: Path) -> None:
    port = str(free_port())
    for name, content in example.files.items():
        (tmp_path / name).write_text(content.replace(_PORT, port))
    script = tmp_path / ("example.py" if example.language == "python" else "example.sh")
    script.write_text(example.code.replace(_PORT, port))
    command = [sys.executable] if example.language == "python" else [_bash(), "-euo", "pipefail"]
    code, printed, log = _run([*command, script.name], tmp_path)
    assert code == 0, f"exit code {code}\n{printed}\n{log}"
    if example.output is not None:
        expected = _pattern(example.output.replace(_PORT, port))
        assert expected.fullmatch(printed.strip()), f"printed:\n{printed}\nexpected:\n{example.output}\n{log}"


def _bash() -> str:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    return bash


def _pattern(output: str) -> re.Pattern[str]:
    return re.compile(re.escape(output.strip()).replace(r"\.\.\.", ".*"), re.DOTALL)


def _run(command: list[str], folder: Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error; the process group is gone afterwards."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            command, cwd=folder, env=_environment(), stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            code = process.wait(_SECONDS)
            left = _members_of(process.pid)
            _, left = psutil.wait_procs(left, _GOODBYE_SECONDS)
            assert not left, f"the example left {[each.info['cmdline'] for each in left]} running"
        finally:
            for each in _members_of(process.pid):
                each.kill()
            process.wait()
        stdout.seek(0)
        stderr.seek(0)
        return code, stdout.read(), stderr.read()


def _environment() -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("RALLYPOINT", "USE_"))}
    scripts = str(Path(sys.executable).parent)
    return {**plain, "PATH": f"{scripts}{os.pathsep}{plain['PATH']}", "NO_COLOR": "1", "COLUMNS": "100"}


def _members_of(group: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, PermissionError):
            continue
    return found


# Links

_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(?P<text>.+?) *$", re.MULTILINE)


def _anchors(path: Path) -> set[str]:
    """The anchors that a page has on the usual hosts: from its headings."""
    headings = _HEADING.findall(_FENCED.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _leads_nowhere(page: Path, target: str) -> bool:
    """Pages of docs/ link to each other alone: a site of them has nothing else."""
    file, _, anchor = target.partition("#")
    goal = (page.parent / file).resolve() if file else page
    leaves = _DOCS in page.parents and _DOCS not in goal.parents
    return leaves or not goal.exists() or bool(anchor and anchor not in _anchors(goal))


def test_links_lead_somewhere() -> None:
    links = [(page, link) for page in _PAGES for link in _LINK.findall(_FENCED.sub("", page.read_text()))]
    inner = [(page, link) for page, link in links if "://" not in link]
    assert [(page.name, link) for page, link in inner if _leads_nowhere(page, link)] == []


_FILE = re.compile(r"(?<![\w./-])(?:src|tests|examples|docs)/[\w./-]*\w")


def test_named_files_exist() -> None:
    """All but those of old versions, which the changelog may name."""
    pages = [page for page in _PAGES if page.name != "CHANGELOG.md"]
    named = [(page.name, path) for page in pages for path in _FILE.findall(page.read_text())]
    assert len(named) > 20
    assert [each for each in named if not (_ROOT / each[1]).exists()] == []


_PLACE = re.compile(r"`(?P<file>[a-z_]+(?:/[a-z_]+)*\.pyx?)(?::(?P<name>\w+))?`")


def test_places_in_the_code_exist() -> None:
    """The architecture names files by the end of their path, and what is defined in them."""
    files = {path.relative_to(_ROOT).as_posix(): path for path in _ROOT.glob("[st]*/**/*.py*")}
    for place in _PLACE.finditer((_DOCS / "concepts/architecture.md").read_text()):
        found = [path for name, path in files.items() if f"/{name}".endswith(f"/{place['file']}")]
        found += [_ROOT / place["file"]] * (_ROOT / place["file"]).is_file()
        assert found, place[0]
        defined = re.compile(rf"^ *(?:(?:async )?def |class )?{place['name']}\b", re.MULTILINE)
        assert not place["name"] or any(defined.search(path.read_text()) for path in found), place[0]


def test_nobody_is_told_to_install_it_from_an_index() -> None:
    """The README installs it from a clone, with `.` and `'.[web]'`, and promises no index."""
    told = re.compile(r"pip install (-\S+ )*'?rallypoint\b(?!-)")
    pages = [page for page in _PAGES if page.name != "CHANGELOG.md"]
    files = [*pages, *(_ROOT / "src").rglob("*.py"), *(_ROOT / "src").rglob("*.toml")]
    assert [path.name for path in files if told.search(path.read_text(encoding="utf-8"))] == []


def test_every_page_is_in_the_index() -> None:
    index = _DOCS / "index.md"
    linked = {
        (index.parent / target.partition("#")[0]).resolve() for target in _LINK.findall(index.read_text())
    }
    assert {page for page in _PAGES if index.parent in page.parents} - {index} <= linked


# Completeness


def _public_members(name: str) -> Iterator[str]:
    value = getattr(rallypoint, name)
    if isinstance(value, type) and not issubclass(value, tuple):
        yield from (member for member in vars(value) if not member.startswith("_"))


def test_public_names_are_documented() -> None:
    text = (_REFERENCE / "python.md").read_text()
    assert [name for name in rallypoint.__all__ if f"`{name}" not in text] == []
    members = [(name, member) for name in rallypoint.__all__ for member in _public_members(name)]
    assert [pair for pair in members if not re.search(rf"`[^`\n]*\b{pair[1]}\b", text)] == []


def test_limits_are_documented() -> None:
    rows = [line.split("|") for line in (_DOCS / "guides/limits.md").read_text().splitlines()]
    told = {row[1].strip(): row[2].strip() for row in rows if len(row) > 3}
    for limit in fields(Limits):
        shown = f"{limit.default:,}" if isinstance(limit.default, int) else f"{limit.default:g}"
        assert told.get(f"`{limit.name}`") == shown, limit.name


def _commands() -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Each command, and the options that it has."""
    yield (), {"--version", "--install-completion", "--show-completion"}
    for name, summary in COMMANDS.items():
        if name == "run":  # it takes its command line apart by itself
            yield (name,), {each.flag for each in OPTIONS} | {each.flag for each in FLAGS} - {"--help"}
            continue
        found: Command | Group = getattr(import_module(f"rallypoint.cli.{name}"), name)
        assert found.summary == summary
        below = found.commands if isinstance(found, Group) else {}
        yield (name,), set() if isinstance(found, Group) else set(found.options)
        yield from (((name, each), set(command.options)) for each, command in below.items())


def test_options_are_documented() -> None:
    sections = re.split(r"^#+ +", (_REFERENCE / "cli.md").read_text(), flags=re.MULTILINE)
    for command, options in _commands():
        heading = "`" + " ".join(("rallypoint", *command)) + "`"
        section = next((text for text in sections if text.startswith(heading + "\n")), "")
        assert section, f"{heading} is not in the reference"
        assert {option for option in options if f"`{option}" not in section} == set(), heading


def test_every_command_tells_what_it_does() -> None:
    for command, options in _commands():
        told = invoke(*command, "--help", environ={"NO_COLOR": "1"})
        assert (told.exit_code, told.stderr) == (0, "")
        assert {option for option in options if f"{option} " not in told.stdout.replace("\n", " ")} == set()


def test_operations_are_documented() -> None:
    for op in Op:
        page = "protocol.md" if op < Op.SESSION or op >= Op.SNAPSHOT else "sessions.md"
        row = rf"^\| {op.value} \| `{op.name}` \|"
        assert re.search(row, (_REFERENCE / page).read_text(), flags=re.MULTILINE), op


def test_errors_are_documented() -> None:
    text = (_REFERENCE / "errors.md").read_text()
    names = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert [name for name in names if f"\n## `{name}`\n" not in text] == []
