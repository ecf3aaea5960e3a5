"""Real processes are asked what they are doing, without torch: each answers, and none is harmed."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import pytest

from processes import hand_over
from rallypoint.launch.environment import inject
from rallypoint.launch.handover import Handover
from rallypoint.launch.reports import ACTIVITY, STALL, Reports
from rallypoint.launch.stacks import progress, signals_of, stack_signals, steps, watching
from rallypoint.launch.stacks.activity import MachineActivity, RankActivity, unpack
from rallypoint.launch.stacks.flight_recorder import PIPES, read_recorders, with_pipes
from rallypoint.launch.stacks.frames import Dump, fold
from rallypoint.launch.stacks.progress import JobActivity, put_together
from rallypoint.launch.stacks.requesting import Source, StackRequest, rank_among, request_stacks, sources_in
from rallypoint.launch.stacks.sampling import RankSampler
from rallypoint.launch.stacks.steps import read_step, step
from rallypoint.launch.stacks.system import (
    children_of,
    helper_of,
    mask_of,
    names_of,
    py_spy_program,
    read_process,
    read_process_elsewhere,
)
from rallypoint.launch.stacks.watching import StallWatch, StoreChannel, answering
from rallypoint.launch.stacks.words import group_lines, stall_lines
from rallypoint.watch.status.views import all_lines, rank_lines

if sys.platform != "linux":
    pytest.skip("it asks as Linux does", allow_module_level=True)

SECONDS = 60.0
SIGNALS = signals_of("on", "the test")
MAIN = SIGNALS[0]
TORCH = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"

WAYS = {
    "sleep": ("import time\ndef odd(): time.sleep(1000)", "sleep()"),
    "fifo": ("def odd(): open(FIFO).read()", "open() of "),
    "pipe": ("import os\nends = os.pipe()\ndef odd(): os.read(ends[0], 1)", "read() of a pipe"),
    "input": ("def odd(): input()", "read() of standard input"),
    "python": ("def odd():\n    while True: pass", ""),
    "the lock held": ("import re\ndef odd(): re.match('(a+)+$', 'a' * 60 + 'b')", ""),
    "a lock": (
        "import threading\nlock = threading.Lock()\nlock.acquire()\ndef odd(): lock.acquire()",
        "lock",
    ),
    "a child": (
        "import os\ndef odd():\n    child = os.fork()\n    os.waitpid(child, 0) if child else in_child()\n"
        "def in_child(): open(FIFO).read()",
        "waits for a process",
    ),
}
"""What a rank does in its function `odd`, and what the system says of it."""


class Ranks:
    """Python processes that are ranks of a job, as a launcher starts them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "reports"
        self.folder.mkdir()
        self._fifo = folder / "fifo"
        os.mkfifo(self._fifo)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, script: str, environ: Mapping[str, str] | None = None) -> Source:
        """Start a rank, and wait until it is in the last line of its script."""
        rank = len(self.processes)
        body, _, last = script.rstrip("\n").rpartition("\n")
        path = self._fifo.with_name(f"script_{crc32(script.encode())}.py")  # the same for the same script
        path.write_text(f"FIFO = {str(self._fifo)!r}\n{body}\nprint('ready', flush=True)\n{last}\n")
        process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **inject(os.environ),
                **Handover(self.folder, SIGNALS).variables(),
                "RANK": str(rank),
                **(environ or {}),
            },
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return next(each for each in sources_in(self.folder) if each.rank == rank)

    def ask(self, *sources: Source) -> dict[int, Dump]:
        return request_stacks(
            [StackRequest(each, each.pid, read_process(each.pid)) for each in sources], SIGNALS
        )

    def ask_until_all_answer(self, *sources: Source) -> dict[int, Dump]:
        """Beside a load, one may be late."""
        dumps, deadline = self.ask(*sources), time.monotonic() + SECONDS
        while len(dumps) < len(sources):
            assert time.monotonic() < deadline
            dumps.update(self.ask(*sources))
        return dumps

    def sample_until(self, holds: Callable[[RankActivity], object], seconds: float = 1000.0) -> RankActivity:
        """The last of the ranks, as soon as it is as it should be; `seconds` is the patience."""
        sampler, deadline = RankSampler(self.folder, SIGNALS, seconds), time.monotonic() + SECONDS
        while True:
            last = sampler.sample().ranks[-1]
            if holds(last):
                return last
            assert time.monotonic() < deadline, last
            time.sleep(0.01)

    def end(self) -> None:
        for each in self.processes:
            for child in children_of(each.pid):
                os.kill(child, signal.SIGKILL)
            each.kill()
            each.communicate()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path)
    try:
        yield started
    finally:
        started.end()


def awaited(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_whatever_a_rank_does_it_answers_with_its_line(ranks: Ranks) -> None:
    sources = {way: ranks.start(f"{script}\nodd()") for way, (script, _) in WAYS.items()}
    for way, (_, call) in WAYS.items():
        awaited(lambda: call in read_process(sources[way].pid).facts.call)  # noqa: B023
    dumps = ranks.ask_until_all_answer(*sources.values())
    for way, source in sources.items():
        own = fold(dumps[source.pid].stack).own
        assert [each.function for each in own][:2] == ["odd", "<module>"], way
    [child] = children_of(sources["a child"].pid)
    awaited(lambda: "open() of " in read_process(child).facts.call)
    answer = request_stacks([StackRequest(sources["a child"], child, read_process(child))], SIGNALS)
    assert answer[child].stack[0].function == "in_child"


LOCKS = {
    "a lock": "lock.acquire()",
    "a queue": "import queue; queue.Queue().get()",
    "an event": "threading.Event().wait()",
    "a thread": "holder.join()",
}


def test_a_rank_that_waits_for_a_lock_tells_its_other_threads(ranks: Ranks) -> None:
    sources = {
        way: ranks.start(
            "import threading, time\nlock = threading.Lock()\nheld = threading.Event()\n"
            "def hold():\n    with lock:\n        held.set()\n        time.sleep(1000)\n"
            "holder = threading.Thread(target=hold, daemon=True)\nholder.start()\nheld.wait()\n" + call
        )
        for way, call in LOCKS.items()
    }
    for source in sources.values():
        awaited(lambda: read_process(source.pid).facts.call.startswith("waits for a lock"))  # noqa: B023
    dumps = ranks.ask(*sources.values())
    for way, source in sources.items():
        dump = dumps[source.pid]
        assert dump.stack[-1].function == "<module>", way
        assert [fold(each).own[0].function for each in dump.others] == ["hold"], way


HELD = """
import ctypes, threading
def hold():
    begun.wait()
    ctypes.PyDLL(None).usleep(1000 * 10**6)
def idle(): open(FIFO).read()
def odd():
    begun.set()
    while True: pass
begun = threading.Event()
for each in (idle, hold, idle): threading.Thread(target=each, daemon=True).start()
odd()
"""


def test_a_thread_that_holds_the_gil_is_named(ranks: Ranks) -> None:
    ranks.start("import time\ntime.sleep(1000)")
    ranks.start(HELD)
    seen = ranks.sample_until(lambda each: each.lock_holder and each.still_seconds > 1)
    assert "odd" in [each.function for each in seen.stack]
    assert seen.lock_holder[0].function == "hold"
    [group] = put_together([MachineActivity("a", (seen,))]).groups
    told = "\n".join(group_lines(group))
    assert re.search(r"another thread of rank 1 holds the interpreter lock \(GIL\): hold \(script_", told)


def test_blocked_signals_closed_files_and_many_threads_end_nothing(ranks: Ranks) -> None:
    sources = [
        ranks.start(f"{script}\nodd()")
        for script in (
            "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
            "def odd(): time.sleep(1000)",
            "import os, time\nos.closerange(3, 1000)\ndef odd(): time.sleep(1000)",
            "import threading, time\nfor _ in range(120): threading.Timer(1000, print).start()\n"
            "def odd(): time.sleep(1000)",
        )
    ]
    awaited(lambda: {d.stack[0].function for d in ranks.ask_until_all_answer(*sources).values()} == {"odd"})


def test_the_helper_thread_is_ready_before_the_script_runs(ranks: Ranks, tmp_path: Path) -> None:
    """It opens a file to take its name: a script that closes all files at once would leave it without one."""
    names = tmp_path / "names"
    ranks.start(
        "import os, time\nfolder = '/proc/self/task'\n"
        "names = [open(f'{folder}/{each}/comm').read() for each in os.listdir(folder)]\n"
        f"open({str(names)!r}, 'w').write(''.join(names))\ntime.sleep(1000)"
    )
    awaited(lambda: names.exists() and bool(names.read_text()))
    assert "rallypoint\n" in names.read_text()


def test_after_all_files_were_closed_a_rank_that_holds_the_gil_answers_again(ranks: Ranks) -> None:
    source = ranks.start(
        "import ctypes, os\nos.closerange(3, 1000)\ndef odd():\n    input()\n"
        "    ctypes.PyDLL(None).usleep(1000 * 10**6)\nodd()"
    )
    ranks.ask_until_all_answer(source)  # it opens the file anew
    go_on(ranks.processes[0])
    awaited(lambda: [each.stack[0].line for each in ranks.ask(source).values()] == [6])


def test_of_a_process_that_c_code_has_forked_the_state_is_told(ranks: Ranks) -> None:
    source = ranks.start(
        "import ctypes, os\nends = os.pipe()\n"
        "if ctypes.PyDLL(None).fork() == 0: os.read(ends[0], 1)\nos.wait()"
    )
    [child] = children_of(source.pid)
    [told] = ranks.sample_until(lambda each: each.children, 1.0).children
    assert helper_of(child) == 0
    assert (told.pid, told.stack, told.facts.call) == (child, (), "read() of a pipe")


def test_a_rank_that_is_stopped_is_not_asked_its_stack_has_its_age_and_it_goes_on_later(ranks: Ranks) -> None:
    source = ranks.start("import time\ndef odd(): time.sleep(1000)\nodd()")
    sampler = RankSampler(ranks.folder, SIGNALS, 1000.0)
    awaited(lambda: bool(sampler.sample().ranks[0].stack))
    os.kill(source.pid, signal.SIGSTOP)
    awaited(lambda: read_process(source.pid).state == "T")
    [activity] = sampler.sample().ranks
    assert activity.facts.state.startswith("is stopped")
    assert activity.stack_seconds > 0
    assert not mask_of(source.pid, helper_of(source.pid)).pending
    work = put_together([MachineActivity("a", (activity,))])
    assert stall_lines(work)[0].startswith("rank 0 on a does not answer, last seen 0.")
    assert " ago in time" not in all_lines(work, with_summary=False)[1]
    assert any(line.startswith("  its stack of 0.") for line in all_lines(work, with_summary=False))
    assert "last seen 0." in rank_lines(work, 0)[0]
    os.kill(source.pid, signal.SIGCONT)
    ranks.ask_until_all_answer(source)  # once its helper thread has gone on, too


HOLDS_LOCK = "re.match('(a+)+$', 'a' * 60 + 'b')"


@pytest.mark.parametrize(
    "change",
    [
        f"import faulthandler, re\nfaulthandler.unregister({SIGNALS[1]})\n{HOLDS_LOCK}",
        f"import os, re\nos.closerange(3, 1000) or {HOLDS_LOCK}",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-I', '-c', 'import time;'\n"
        " 'print(\"ready\", flush=True); time.sleep(1000)'])\ntime.sleep(1000)",
    ],
    ids=["it has taken the signal back", "it has closed the file", "it has become another program"],
)
def test_a_process_that_would_be_harmed_is_left_alone(ranks: Ranks, change: str) -> None:
    source = ranks.start(change)
    awaited(lambda: ranks.ask(source) == {})
    assert ranks.processes[0].poll() is None


def test_a_signal_that_the_program_uses_is_left_to_it(ranks: Ranks) -> None:
    source = ranks.start(
        "import faulthandler, signal, time\nfaulthandler.unregister(SIGNAL)\n"
        "import os\nsignal.signal(SIGNAL, lambda *_: os.write(1, b'its own\\n'))\n"
        "import rallypoint_hooks\nrallypoint_hooks._answers = None\n"
        "rallypoint_hooks.answer_for_stacks(FOLDER, 0, [SIGNAL])\ntime.sleep(1000)".replace(
            "SIGNAL", str(MAIN)
        ).replace("FOLDER", repr(str(ranks.folder)))
    )
    process = ranks.processes[0]
    os.kill(source.pid, MAIN)
    assert process.stdout is not None
    assert process.stdout.readline() == "its own\n"


def test_a_rank_that_ends_while_it_is_asked_ends_as_it_would(ranks: Ranks) -> None:
    for _ in range(5):
        source = ranks.start("input()")
        process = ranks.processes[-1]
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        while process.poll() is None:
            request_stacks([StackRequest(source, source.pid, read_process(source.pid))], SIGNALS, 0.0)
        assert process.returncode == 0


def test_a_program_that_enters_functions_all_the_time_is_not_harmed(ranks: Ranks) -> None:
    """`faulthandler` crashes such a one within a hundred signals, on some Pythons."""
    source = ranks.start(
        "import random\nnumbers = list(range(2000))\nwhile True: sorted(numbers, key=lambda n: -n)"
    )
    for _ in range(100):
        ranks.ask_until_all_answer(source)
    assert ranks.processes[0].poll() is None


def test_the_rank_is_the_one_that_has_joined_or_else_the_outermost(ranks: Ranks) -> None:
    inner = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, {str(ranks.folder.parent / 'inner.py')!r}])"
    )
    (ranks.folder.parent / "inner.py").write_text("import time\ntime.sleep(1000)")
    outer = ranks.start(inner)
    awaited(lambda: len(sources_in(ranks.folder)) == 2)
    sources = sources_in(ranks.folder)
    processes = {each.pid: read_process(each.pid) for each in sources}
    [child] = [each for each in sources if each.pid != outer.pid]
    assert rank_among(sources, processes, []) == outer
    assert rank_among(sources, processes, [child.pid]) == child


@pytest.fixture
def py_spy() -> None:
    """py-spy can look into a process that this one has started; else the test is skipped."""
    program = py_spy_program()
    if program is None:
        pytest.skip("py-spy is not installed")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        command = [program, "dump", "--nonblocking", "--pid", str(process.pid)]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        process.communicate(b"\n", SECONDS)
    if asked.returncode:
        pytest.skip(f"py-spy may not look: {asked.stderr.strip()[:200]}")


@pytest.mark.usefixtures("py_spy")
def test_what_does_not_answer_is_looked_into_from_outside(ranks: Ranks) -> None:
    stopped = ranks.start("import os, signal\ndef odd(): os.kill(os.getpid(), signal.SIGSTOP)\nodd()")
    awaited(lambda: read_process(stopped.pid).state == "T")
    seen = ranks.sample_until(lambda each: each.stack, 1.0)
    assert [each.function for each in seen.stack] == ["odd", "<module>"]
    assert read_process(stopped.pid).state == "T", "it is not continued"


def test_a_step_that_is_no_number_is_refused_everywhere_and_a_full_disk_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(TypeError):
        step(1.5)  # type: ignore[arg-type]
    hand_over(monkeypatch, tmp_path / "not there", (MAIN,))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(steps, "_owner", -1)
    step(7)
    hand_over(monkeypatch, tmp_path, (MAIN,))
    for number, told in ((7, 7), (-5, 0), (1 << 70, 1 << 62)):
        monkeypatch.setattr(steps, "_owner", -1)
        step(number)
        assert read_step(tmp_path, 3, os.getpid())[0] == told


def test_a_step_is_read_from_outside(ranks: Ranks) -> None:
    source = ranks.start("import rallypoint, time\nrallypoint.step(41)\nrallypoint.step()\ntime.sleep(1000)")
    number, since = read_step(ranks.folder, 0, source.pid)
    assert number == 42
    assert abs(time.time() - since) < SECONDS
    assert read_step(ranks.folder, 7, source.pid)[0] == -1


class FakeStore(StoreChannel):
    """A channel that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[MachineActivity] = []
        self.text = ""

    @property
    def address(self) -> str:
        return "here:1"

    def report(self, text: str) -> None:
        machine = unpack(text)
        assert machine is not None
        self.told.append(machine)

    def activity(self) -> JobActivity:
        return put_together(self.told[-1:])

    def announce(self, text: str) -> bool:
        self.text = self.text or text
        return self.text == text

    def announced(self) -> str:
        return self.text

    def withdraw(self) -> None:
        self.text = ""

    def close(self) -> None:
        pass


COLLECTIVE = f"""
def all_reduce():
    exec(compile("def all_reduce(): input()", {TORCH!r}, "exec"), globals())
    globals()["all_reduce"]()
"""


@contextmanager
def sampled(ranks: Ranks, seconds: float, said: list[list[str]]) -> Iterator[FakeStore]:
    store = FakeStore()
    watch = StallWatch(ranks.folder, SIGNALS, seconds, lambda _: store, said.append)
    try:
        yield store
    finally:
        watch.stop()


def test_the_odd_rank_is_said_once_and_not_before_its_time(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = [ranks.start(f"{COLLECTIVE}\ndef train():\n    all_reduce()\ntrain()") for _ in range(2)]
    ranks.start("import time\ndef load():\n    time.sleep(1000)\nload()")
    said: list[list[str]] = []
    gathered: list[int] = []

    def gather(pids: Collection[int]) -> dict[int, str]:
        gathered.append(len(pids))
        return {}

    monkeypatch.setattr(watching, "gpus_of", gather)
    began = time.monotonic()
    with sampled(ranks, 2.0, said) as store:
        awaited(lambda: bool(said))
        assert time.monotonic() - began >= 2.0
        [[first, second, third]] = said
        assert first.startswith("2 of 3 ranks wait in all_reduce (script_")
        assert "rank 2 on " in first
        assert second.startswith("  load (script_")
        assert third == "see `rallypoint stacks here:1`"
        assert Reports(ranks.folder).read(STALL) == "\n".join([first, second])
        count = len(store.told)
        awaited(lambda: len(store.told) > count + 2)
        assert len(said) == 1
        assert gathered == [3]
        for source in waiting:
            go_on(ranks.processes[source.rank])
        awaited(lambda: len(said) == 2)
        assert said[1] == ["the ranks go on"]
        assert third == "see `rallypoint stacks here:1`"
        assert Reports(ranks.folder).read(STALL) == ""


TRANSFER = f"""
import os, socket, threading, time
{COLLECTIVE}
def move():
    ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.socket()
    theirs.connect(ours.getsockname())
    ours, _ = ours.accept()
    while os.path.exists(FIFO):
        theirs.sendall(bytes(65536))
        ours.recv(65536, socket.MSG_WAITALL)
        time.sleep(0.1)
threading.Thread(target=move, daemon=True).start()
all_reduce()
"""


def test_while_a_collective_moves_data_its_ranks_do_not_stand_still(ranks: Ranks, tmp_path: Path) -> None:
    ranks.start(TRANSFER)
    sampler = RankSampler(ranks.folder, SIGNALS, 2.0)
    seconds: list[float] = []

    def idle() -> float:
        seconds.append(put_together([sampler.sample()]).idle_seconds)
        return seconds[-1]

    end = time.monotonic() + 5.0
    awaited(lambda: idle() > 5.0 or time.monotonic() > end)
    assert max(seconds) < 4.0
    (tmp_path / "fifo").unlink()
    awaited(lambda: idle() > 4.0)


TIMED_OUT = f"""
exec(compile("def all_reduce():\\n input()\\n raise RuntimeError('Timed out waiting 3000ms for recv')",
    {TORCH!r}, "exec"))
def train():
    all_reduce()
"""


def go_on(rank: subprocess.Popen[str]) -> None:
    """Let a rank go on that is in `input`."""
    assert rank.stdin is not None
    rank.stdin.write("\n")
    rank.stdin.flush()


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples come every half second, whatever the patience is."""
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.5)


@pytest.mark.usefixtures("hurry")
def test_when_a_time_out_strikes_all_are_looked_at_before_the_first_rank_ends(ranks: Ranks) -> None:
    struck = ranks.start(f"{TIMED_OUT}\ntrain()")
    ranks.start("import time\ndef load():\n    time.sleep(1000)\nload()")
    said: list[list[str]] = []
    with sampled(ranks, 1000.0, said) as store:
        awaited(lambda: bool(store.told))
        go_on(ranks.processes[struck.rank])
        assert ranks.processes[struck.rank].wait(SECONDS) == 1
        stall = Reports(ranks.folder).read(STALL)
        assert stall.startswith("a time-out has struck rank 0: 1 of 2 ranks waits in ")
        [[first, second, _]] = said
        assert "all_reduce (script_" in first
        assert "; rank 1 on " in first
        assert second.startswith("  load (script_")
        assert not list(ranks.folder.glob("ending-*"))
    [failure] = Reports(ranks.folder).failures()
    assert [each.function for each in failure.stack] == ["all_reduce", "train", "<module>"]


SLOW_TO_TELL = """
import time
class Slow(Exception):
    def __str__(self):
        open(FIFO + ".told", "w").close()
        time.sleep(1000)
def odd():
    input()
    raise Slow
odd()
"""


def test_of_a_rank_that_reports_its_error_it_is_told_what_it_did_before(ranks: Ranks, tmp_path: Path) -> None:
    source = ranks.start(SLOW_TO_TELL)
    sampler = RankSampler(ranks.folder, SIGNALS, 1000.0)

    def functions() -> list[str]:
        return [each.function for each in sampler.sample().ranks[0].stack]

    awaited(lambda: functions() == ["odd", "<module>"])
    go_on(ranks.processes[0])
    awaited((tmp_path / "fifo.told").exists)
    awaited(lambda: any("__str__" in str(each.stack) for each in ranks.ask(source).values()))
    assert functions() == ["odd", "<module>"]


@pytest.mark.slow
@pytest.mark.usefixtures("hurry")
def test_who_waits_for_a_rank_that_has_ended_has_less_time(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_AFTER_END_SECONDS", 1.0)
    ranks.start(f"{COLLECTIVE}\nall_reduce()")
    early = ranks.start("def load():\n    input()\nload()")
    said: list[list[str]] = []
    with sampled(ranks, 1000.0, said) as store:
        awaited(lambda: bool(store.told))
        go_on(ranks.processes[early.rank])
        awaited(lambda: bool(said))
    assert "; rank 1 on " in said[0][0]
    assert said[0][0].endswith(" has ended (its process is gone):")
    assert said[0][1].startswith("  last seen in load (script_")


def test_ranks_that_move_are_no_stall(ranks: Ranks) -> None:
    for _ in range(2):
        ranks.start(
            "import time\nexec(compile('def all_reduce(): time.sleep(0.01)', "
            f"{TORCH!r}, 'exec'))\nwhile True: all_reduce()"
        )
    said: list[list[str]] = []
    with sampled(ranks, 1.0, said) as store:
        awaited(lambda: len(store.told) > 6)
    assert said == []
    activity = Reports(ranks.folder).read(ACTIVITY)
    assert activity is not None
    assert [each.rank for each in activity.ranks] == [0, 1]


def test_the_signals_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, numbers in (
        ("", (signal.SIGRTMAX - 3, signal.SIGRTMAX - 4)),
        ("SIGUSR2", (signal.SIGUSR2,)),
        ("sigrtmin+5, 60", (signal.SIGRTMIN + 5, 60)),
        ("OFF", ()),
    ):
        assert signals_of(text, "the test") == numbers
    monkeypatch.setenv("RALLYPOINT_STACKS", "off")
    assert stack_signals() == ()
    environ = {**Handover(Path("folder")).variables(), "RALLYPOINT_STACKS": "off"}
    assert answering(environ) == environ


def test_a_recorder_of_torchs_is_asked_for_its_last_collectives(tmp_path: Path) -> None:
    environ = with_pipes(
        {"TORCH_FR_BUFFER_SIZE": "200", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/dump_"}, tmp_path
    )
    assert with_pipes({}, tmp_path) == {}
    pipes = []
    for rank, operation in enumerate(("nccl:all_reduce", "nccl:broadcast")):
        os.mkfifo(f"{environ[PIPES]}{rank}.pipe")
        pipes.append(os.open(f"{environ[PIPES]}{rank}.pipe", os.O_RDONLY | os.O_NONBLOCK))  # as torch does
        entry = {"collective_seq_id": 7, "process_group": ("0", "default_pg"), "profiling_name": operation}
        (tmp_path / f"dump_{rank}").write_bytes(pickle.dumps({"entries": [entry]}))
    try:
        recorded = read_recorders([0, 1, 2], environ)
        assert [os.read(pipe, 9) for pipe in pipes] == [b"1\n", b"1\n"]
    finally:
        for pipe in pipes:
            os.close(pipe)
    assert sorted(recorded) == [0, 1]
    ranks = tuple(RankActivity(rank, 1, recorded=calls) for rank, calls in recorded.items())
    text = "\n".join(stall_lines(put_together([MachineActivity("a", ranks)])))
    assert "group 0 default_pg, collective 7: the ranks call different ones" in text
    assert "rank 1: nccl:broadcast" in text


def test_a_system_without_proc_tells_that_a_process_is_there_and_works() -> None:
    before = read_process_elsewhere(os.getpid())
    assert (before.is_here, before.parent) == (True, os.getppid())
    assert before.facts.memory > 1 << 20
    awaited(lambda: sum(range(10_000)) > 0 and read_process_elsewhere(os.getpid()).wakes > before.wakes)
    assert read_process_elsewhere(os.getpid()).began == before.began
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert not read_process_elsewhere(process.pid).is_here


def test_the_calls_of_both_architectures_are_known() -> None:
    x86, arm = names_of("x86_64"), names_of("aarch64")
    assert (x86[0], arm[63]) == ("read", "read")
    assert (x86[202], arm[98]) == ("futex", "futex")
    assert set(x86.values()) - set(arm.values()) == {"poll", "select", "epoll_wait"}
    assert names_of("riscv64") == {}
