"""`rallypoint run`: start a job, so that it comes up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from rallypoint.cli.printing import print_rows, print_settings_file
from rallypoint.errors import RallypointError, UsageError
from rallypoint.exits import signal_name
from rallypoint.launch import reports
from rallypoint.launch.blame import FailureSummary, LostServer, find_blame
from rallypoint.launch.command import (
    Ended,
    SignalProbe,
    end_as,
    end_orphans,
    run_command,
    to_agent,
    to_rank,
)
from rallypoint.launch.config import Program, settle, split_arguments
from rallypoint.launch.endpoint import Endpoints
from rallypoint.launch.environment import isolating_file
from rallypoint.launch.handover import read_handover
from rallypoint.launch.job import (
    Task,
    check_is_alone,
    environment_of_job,
    task_of,
    to_torchrun,
    variables_of_job,
)
from rallypoint.launch.options import FLAGS, OPTIONS, Level, Settings, flag_of, text_of
from rallypoint.launch.rendezvous.roster import Size
from rallypoint.launch.reports import Reports
from rallypoint.launch.schedulers import find_placement, idle_machines
from rallypoint.store.server.guard.secret import take_secret
from rallypoint.text import LONGEST_SENTENCE, printable, shown

_FOR_COMMANDS = tuple(each.name for each in OPTIONS if each.for_processes)
_FOR_TASKS = (*_FOR_COMMANDS, *(each.name for each in OPTIONS if each.for_tasks), "rdzv_id")

_TRACEBACK_LINES = 12
_FIRST_REMARK = 30.0  # seconds; then twice as long each time


_FORMS = ("[OPTIONS] SCRIPT [ARGS]...", "[OPTIONS] -m MODULE [ARGS]...", "[OPTIONS] -- COMMAND [ARGS]...")
_HELP = """Start a distributed job, so that it comes up.

A script or a module runs through torchrun, on Rallypoint's rendezvous. A command runs as it is, with
Rallypoint's help where torch needs it.

Every other option goes to torchrun as it is: --max-restarts, --rdzv-id, --log-dir, --tee, ...
"""


def run(prog: str, words: Sequence[str]) -> int:
    """Start a script, a module (-m) or a command (--) as a distributed job; --help tells the options.

    The words are taken apart by `rallypoint.launch.config`, which knows what belongs to the script.
    """
    order = split_arguments(words)
    if order.help:
        _print_help(prog)
        return 0
    is_command = _is_command(order.target) and not order.tasks
    placement = None if is_command else find_placement(os.environ, _read_file)
    settings = settle(order.options, os.environ, Path.cwd(), placement)
    print_settings_file(settings.file, (*settings.warnings, *_machine_warnings(settings, order.target)))
    if order.show_config:
        _print_config(settings, as_json=order.json)
        return 0
    assert order.target is not None  # split_arguments sees to that
    if _is_command(order.target):
        _warn_of_isolation(order.target.words[0])
    if order.tasks:
        _check_options(
            order.options, _FOR_TASKS, "with --tasks: the scheduler has started the ranks", "leave it out"
        )
        _set_variables_of_ranks(settings)
        return end_as(_run(settings, order.target, task_of(settings), explains=not order.no_explain))
    if is_command:
        _check_options(
            order.options,
            _FOR_COMMANDS,
            "to a command behind --",
            "give it to the command itself: rallypoint run -- torchrun {flag}=...",
        )
    check_is_alone(settings)
    return end_as(_run(settings, order.target, None, explains=not order.no_explain))


def _is_command(target: Program | None) -> bool:
    return target is not None and target.kind == "command"


def _read_file(path: str) -> str:
    """The text of a file that a scheduler names; nothing if it cannot be read here."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _machine_warnings(settings: Settings, target: Program | None) -> Iterator[str]:
    """What may be wrong with where this process was started, as far as a scheduler tells."""
    idle, nodes = idle_machines(os.environ), settings.nnodes
    if idle is not None and not (_is_command(target) or nodes.is_set or settings.standalone.value):
        yield (
            f"Slurm has {idle.value} machines for this job ({idle.variable}), but srun has not started this "
            "process: it uses this machine alone; to use all, write srun rallypoint run ..."
        )
    is_placed = settings.placement is not None and settings.placement.node_rank is not None
    if nodes.level is Level.SCHEDULER and nodes.value.most > 1 and not is_placed:
        yield (
            f"{nodes.source} says {nodes.text} machines: this command has to be started on each of them, or "
            "the others are waited for; --standalone is for this machine alone"
        )


def _check_options(given: Mapping[str, object], known: Sequence[str], to_whom: str, remedy: str) -> None:
    """UsageError for an option that is torchrun's, where there is no torchrun of ours."""
    foreign = [name for name in given if name not in known]
    if foreign:
        flag = flag_of(foreign[0])
        raise UsageError(f"{flag} means nothing {to_whom}", hint=remedy.format(flag=flag))


def _warn_of_isolation(program: str) -> None:
    """Say that the Python of a command will not find Rallypoint, and what to do instead. Windows alone."""
    found = shutil.which(program) if sys.platform == "win32" else None
    file = isolating_file(Path(found)) if found else None
    if file is not None:
        python = file.parent / "python.exe"
        print(
            f"rallypoint: {file} lets its Python find only what is listed there, so this command gets no help"
            f"\n\nhint: install Rallypoint for that Python (docs/guides/windows.md says how), say "
            f'`"{python}" -m rallypoint enable`, once, and start the command as before',
            file=sys.stderr,
        )


def _run(settings: Settings, target: Program, task: Task | None, *, explains: bool) -> int:
    began = time.time()
    with reports.new_folder() as folder:
        found = Reports(folder, of_task=task is not None)
        lost: list[LostServer] = []
        if task is not None:
            ended = _run_rank(settings, target, task, folder)
        else:
            ended, lost = _run_job(settings, target, folder)
        if ended.code and ended.end_signal and (task is not None or not _is_command(target)):
            _print_missing(found)
            # torchrun ends with 1, and that is no failure of a rank.
            return -ended.end_signal if task is None else ended.code
        if ended.code:
            blame = _print_failure(found, lost)
            if blame is not None and explains:
                log_dir = settings.passed_on.get("log_dir")
                _explain(blame, log_dir.text if log_dir is not None else "", began)
        return ended.code


def _run_job(settings: Settings, target: Program, folder: Path) -> tuple[Ended, list[LostServer]]:
    """Run torchrun with all ranks of this machine, or a command."""
    is_agent = not _is_command(target)
    environ = environment_of_job(settings, os.environ, folder, is_command=not is_agent)
    line = _JoinLine(Reports(folder), from_start=is_agent)
    command = _command(settings, target, str(folder / "torchrun"))
    if not is_agent:
        from rallypoint.launch.stacks.watching import answering, watching  # late: agents import it themselves

        environ = answering(environ)
        with watching(folder, environ, _print_stall):
            ended = run_command(command, environ, line.refresh, is_agent=False, on_end=line.stop)
    else:  # torchrun's agent watches its ranks itself
        with SignalProbe(wanted=_may_be_heard(settings)) as probe:
            deliver = to_agent(str(folder), probe.has_heard)
            ended = run_command(
                command, environ, line.refresh, is_agent=True, deliver=deliver, on_end=line.stop
            )
    line.clear()
    if not is_agent or ended.code == 0:
        return ended, []
    from rallypoint.launch.rendezvous.register import post_death_notice

    if ended.code < 0 and ended.code != -signal.SIGINT:  # after Ctrl-C, it has given up itself
        post_death_notice(folder, f"by signal {signal_name(-ended.code)}")
    return ended, end_orphans(ended, str(folder))


def _run_rank(settings: Settings, target: Program, task: Task, folder: Path) -> Ended:
    """Run the one rank that this process is to be."""
    from rallypoint.launch.rendezvous.task_group import run_task  # late: no other job needs these
    from rallypoint.launch.stacks.watching import answering

    given = read_handover(os.environ)._replace(reports=folder)  # this process itself has to report as well
    os.environ.update(given.variables())
    take_secret()  # ranks do not need it
    environ = environment_of_job(settings, os.environ, folder, is_command=False)
    environ = answering({**environ, **task.environment()})
    line = _JoinLine(Reports(folder, of_task=True), from_start=True)
    refresh = line.refresh if task.rank == 0 else lambda: False  # one of all tasks is enough to say it
    with SignalProbe(wanted=_may_be_heard(settings)) as probe:
        deliver = to_rank(probe.has_heard)
        ended = run_task(task, _rank_command(target), environ, folder, refresh, deliver, _print_stall)
    line.clear()
    return ended


def _may_be_heard(settings: Settings) -> bool:
    """Whether the scheduler may send a signal to more than this process."""
    return settings.placement is not None and settings.placement.scheduler.may_signal_everybody


def _rank_command(target: Program) -> list[str]:
    python = {"script": [sys.executable, "-u"], "module": [sys.executable, "-u", "-m"], "command": []}
    return [*python[target.kind], *target.words]


def _command(settings: Settings, target: Program, files: str) -> list[str]:
    if target.kind == "command":
        return list(target.words)
    if find_spec("torch") is None:
        raise RallypointError(
            f"torch is not installed in the environment of {sys.executable}",
            hint="pip install torch, or run the job's own command: rallypoint run -- COMMAND",
        )
    arguments = to_torchrun(settings, target, files)
    # Without the folder it happens to stand in, where another user's torch.py may lie. Python 3.10 cannot.
    options = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *options, "-m", "rallypoint.pytorch.agent", *arguments]


def _set_variables_of_ranks(settings: Settings) -> None:
    """A task starts the store and relays itself: what ranks are told of secrets and users is theirs, too."""
    for name, each in settings.variables.items():
        os.environ.setdefault(name, each.value)
    os.environ.update(variables_of_job(settings))


def _print_stall(lines: Sequence[str]) -> None:
    print("rallypoint: " + "\n".join(lines), file=sys.stderr, flush=True)


class _JoinLine:
    """One line on standard error while the job comes up; on a terminal it lives."""

    def __init__(self, found: Reports, *, from_start: bool) -> None:
        self._found = found
        self._from_start = from_start
        """Whether to show the line before the first rank has come; a command may never have ranks."""
        self._began = time.monotonic()
        self._live = sys.stderr.isatty()
        self._is_over = False
        self._shown = ""
        self._remark_after = _FIRST_REMARK

    def refresh(self) -> bool:
        """Show how many ranks have joined; False when all have. The agent reports that of later attempts."""
        if self._is_over:
            return False
        roll = self._found.roll()
        seconds = time.monotonic() - self._began
        advice = f"; see `rallypoint status {shown(roll.store)}`" if roll.store else ""
        is_later = self._found.read(reports.ATTEMPT) > 0
        if roll.complete or is_later:
            self.clear()
            if not is_later:
                self._write(f"rallypoint: {roll.text} after {seconds:.1f} s{advice}\n")
            return False
        if self._live and (roll.expected or self._from_start):
            waiting = shown(self._found.read(reports.WAITING), LONGEST_SENTENCE)  # with the time that is left
            self._redraw(f"rallypoint: {waiting or f'{roll.text}, {seconds:.0f} s{advice}'}")
        elif roll.expected and seconds > self._remark_after:
            while self._remark_after < seconds:  # the ranks may only be known after a long start
                self._remark_after *= 2
            self._write(f"rallypoint: after {seconds:.0f} s, {roll.text}{advice}\n")
        return True

    def clear(self) -> None:
        if self._shown:
            self._redraw("")

    def stop(self) -> None:
        """Clear the line for good: the job was told to end, and others print something now."""
        self._is_over = True
        self.clear()

    def _redraw(self, text: str) -> None:
        columns = shutil.get_terminal_size().columns - 1  # or it could not be drawn over
        text = text if len(text) <= columns else text[: columns - 3] + "..."
        if text != self._shown:
            self._write("\r" + text.ljust(len(self._shown)) + ("" if text else "\r"))
            self._shown = text

    def _write(self, text: str) -> None:
        """Write to standard error. A job does not end because that is closed."""
        with suppress(OSError, RuntimeError):  # RuntimeError: a signal has interrupted this very function
            sys.stderr.write(text)
            sys.stderr.flush()


def _print_missing(found: Reports) -> None:
    """Print what a job that was told to end had waited for: machines, or ranks if some had joined."""
    roll = found.roll()
    waiting = shown(found.read(reports.WAITING), LONGEST_SENTENCE)
    if not waiting and roll.joined and not roll.complete:
        waiting = roll.text
    if waiting:
        print(f"rallypoint: interrupted: {waiting}", file=sys.stderr)


def _print_failure(found: Reports, lost: Sequence[LostServer]) -> FailureSummary | None:
    """Print which rank, server or agent failed first, and which ranks only followed."""
    lines: list[str] = []
    roll = found.roll()
    if 0 < roll.joined < roll.expected:
        lines.append(roll.text)
    failures = found.failures()
    lost = (*found.read(reports.LOST), *lost)
    blame = found.read(reports.FIRST) or find_blame(failures, found.exits(), lost)
    if blame is not None:
        lines.append(printable(blame.headline))
        lines += [f"  {shown(line, LONGEST_SENTENCE)}" for line in blame.frames()[-_TRACEBACK_LINES:]]
        if followers := blame.followers(failures):
            lines.append("what followed from that:")
            lines += [f"  {printable(each)}" for each in followers[:8]]
    lines += _last_seen(found, blame)
    if lines:
        print("\nrallypoint: " + "\n".join(lines), file=sys.stderr)
    if blame is not None and blame.hint:
        print(f"\nhint: {printable(blame.hint)}", file=sys.stderr)
    return blame


def _last_seen(found: Reports, blame: FailureSummary | None) -> list[str]:
    """What the ranks did before the end, where that may explain it."""
    from rallypoint.launch.stacks.progress import put_together  # late: a job that succeeds does not need it
    from rallypoint.launch.stacks.words import last_place, summary_lines

    if stall := found.read(reports.STALL):
        return [
            "before that, the job stood still:",
            *(f"  {shown(each, 500)}" for each in stall.splitlines()),
        ]
    activity = found.read(reports.ACTIVITY)
    if activity is None or blame is None:
        return []
    if blame.exit is not None:
        return last_place(activity, blame.exit.rank)
    work = put_together([activity])
    if blame.is_timeout and work.odd:
        return ["shortly before that:", *(f"  {each}" for each in summary_lines(work))]
    return []


def _explain(blame: FailureSummary, log_dir: str, began: float) -> None:
    """Print the cause, what to do first, and where the whole report is; nothing if that is not known.

    Whatever is wrong with the logs, the job ends as it ended.
    """
    from rallypoint.launch import last_words  # late: a job that succeeds does not need it

    with suppress(OSError, RallypointError):
        files = last_words.logs_since(Path(log_dir), began) if log_dir else []
        explanation = last_words.explain_failure(blame, files)
        if explanation is not None:
            report = last_words.place_of_report(explanation, files)
            print("\n" + "\n".join(last_words.last_words(explanation, report)), file=sys.stderr)


def _print_help(prog: str) -> None:
    from rallypoint.cli.command import Argument, print_help  # late: only the help needs argparse

    arguments = []
    for each in (*OPTIONS, *(flag for flag in FLAGS if flag.name != "help")):
        names = [name for name in (each.short, each.flag) if name]
        value = {"metavar": each.metavar, "default": text_of(each.default)}
        kind = value if each.metavar else {"action": "store_true"}
        variable = each.variable if each in OPTIONS else ""
        arguments.append(Argument(*names, help=each.help, variable=variable, **kind))
    print_help(prog, _FORMS, _HELP, arguments)


def _print_config(settings: Settings, *, as_json: bool) -> None:
    found = settings.everything()
    if not as_json:
        texts = {name: each.text or ("-" if each.value == "" else "(none)") for name, each in found.items()}
        print_rows([(name, texts[name], each.source) for name, each in found.items()])
        return
    document = {
        name: {
            "value": each.text if isinstance(each.value, Size | Endpoints) else each.value,
            "source": each.source,
        }
        for name, each in found.items()
    }
    print(json.dumps(document, indent=2))
