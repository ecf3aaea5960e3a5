"""One job of `chaos.py`: two machines with four ranks each, in network namespaces, to be tormented.

A machine is a network namespace with a host name and a small disk of its own. The ranks are `chaos_rank.py`.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from chaos_plan import MACHINES, RANKS, RANKS_PER_MACHINE, SESSION_SECONDS, TIMEOUT, Fault
from tun_cable import GOOD, Quality, TunCable

_RANK_SCRIPT = Path(__file__).with_name("chaos_rank.py")
_ENDPOINT_PORT = 29400
_DISK_BYTES = 2 << 20
_SET_HOST_NAME = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
# A machine that is told to go leaves a place, for which the others wait so long before they give up.
_OPTIONS = ("--join-timeout=40", "--rdzv-conf=close_timeout=10")
_VISIT = """
import sys
from rallypoint import TCPStore
for _ in range(50):
    TCPStore(sys.argv[1], int(sys.argv[2]), timeout=30).close()
"""
"""More events than the last block of their file, which it has already, has room for."""
_LIMITS = f"session_seconds={SESSION_SECONDS:g}"


class NotInjectedError(Exception):
    """A fault that cannot be had here, and why."""


class Machine:
    """A network namespace, with a disk."""

    def __init__(self, name: str, namespace: str, address: str, folder: Path) -> None:
        self.name = name
        self.host = f"node-{name}"
        self.namespace = namespace
        self.address = address
        self.disk = folder / f"disk-{name}"
        self.log = folder / f"{self.host}.log"
        self.launcher: subprocess.Popen[bytes] | None = None

    def start(self, *command: str, environ: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command on this machine; what it prints goes to the machine's log."""
        enter = ["ip", "netns", "exec", self.namespace]
        named = ["unshare", "--uts", "sh", "-c", _SET_HOST_NAME, self.host]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*enter, *named, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.disk.parent,
                env={**os.environ, "TMPDIR": str(self.disk), **(environ or {})},
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on it."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        processes = []
        for word in found.stdout.split():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(word))
                if process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes

    def read_log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Job:
    """A job, its machines, and what has become of it so far."""

    def __init__(self, machines: list[Machine], cable: TunCable, folder: Path) -> None:
        self.machines = dict(zip(MACHINES, machines, strict=True))
        self.folder = folder
        self.parts: dict[str, int] = {}
        """The processes of the job by name: store, relay-a, rank-0 and so on."""
        self.store = ""
        """Its address, as ranks know it."""
        self.endpoint = f"{machines[0].address}:{_ENDPOINT_PORT}"
        self._cable = cable

    # Its life

    def start(self) -> None:
        for number, machine in enumerate(self.machines.values()):
            environ = {
                "CHAOS_TIMEOUT": str(TIMEOUT),
                "OMP_NUM_THREADS": "1",
                "RALLYPOINT_EVENTS": str(machine.disk / "events"),
                "RALLYPOINT_LIMITS": _LIMITS,
            }
            machine.launcher = machine.start(
                *(sys.executable, "-m", "rallypoint", "run", "--nnodes=2", *_OPTIONS),
                *(f"--nproc-per-node={RANKS_PER_MACHINE}", f"--node-rank={number}"),
                *(f"--rdzv-endpoint={self.endpoint}",),
                *(f"--local-addr={machine.address}", str(_RANK_SCRIPT)),
                environ=environ,
            )

    def find_parts(self) -> None:
        """Once all ranks run: which process is which."""
        words = {rank: self._words_of(rank) for rank in RANKS}
        self.store = words[RANKS[0]][2]
        self.parts = {rank: int(each[0]) for rank, each in words.items()}
        for machine in self.machines.values():
            assert machine.launcher is not None
            self.parts[f"launcher-{machine.name}"] = machine.launcher.pid
            for process in machine.processes():
                part = self._part_of(process)
                if part:
                    which = part if part == "store" else f"{part}-{machine.name}"
                    self.parts[which] = process.pid

    def _part_of(self, process: psutil.Process) -> str:
        try:
            command = process.cmdline()
            if "rallypoint.pytorch.agent" in command:
                return "agent"
            if "rallypoint.store.relay.process" in command:
                return "relay"
            if "rallypoint.store.server.process.child" in command:
                return "store"
        except psutil.NoSuchProcess:
            pass
        return ""

    def _words_of(self, rank: str) -> list[str]:
        """What a rank has said last: its process, its step and its store."""
        path = self.folder / rank
        return path.read_text().split() if path.exists() else []

    def steps(self) -> list[int]:
        """How far each rank has come."""
        return [int(words[1]) if (words := self._words_of(rank)) else 0 for rank in RANKS]

    def error_of(self, rank: str) -> str:
        """The error that has ended a rank; empty if there is none."""
        path = self.folder / f"{rank}.error"
        return path.read_text() if path.exists() else ""

    def is_done(self, rank: str) -> bool:
        return (self.folder / f"{rank}.done").exists()

    def runs(self, part: str) -> bool:
        pid = self.parts[part]
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def exit_codes(self) -> list[int | None]:
        return [machine.launcher.poll() if machine.launcher else None for machine in self.machines.values()]

    def processes(self) -> list[psutil.Process]:
        return [process for machine in self.machines.values() for process in machine.processes()]

    def tell_to_end(self) -> None:
        (self.folder / "stop").touch()

    def clean_disk(self, machine: str) -> None:
        """Start a launcher again: it removes what a killed one has left."""
        self.machines[machine].start(sys.executable, "-m", "rallypoint", "run", "--", "true").wait()

    def files_left(self) -> list[str]:
        """What lies on the machines' disks, besides their events, and the reports that they have told of."""
        found = [path for machine in self.machines.values() for path in machine.disk.iterdir()]
        return [str(path) for path in found if not path.name.startswith(("events", "rallypoint-report-"))]

    def event_files(self) -> list[Path]:
        return [path for machine in self.machines.values() for path in machine.disk.glob("events*")]

    def _run_on(self, machine: str, *command: str) -> str:
        enter = ["ip", "netns", "exec", self.machines[machine].namespace]
        return subprocess.run([*enter, *command], capture_output=True, text=True, check=True).stdout

    # What is done to it

    def inject(self, fault: Fault) -> Callable[[], None]:
        """Begin a fault; the answer ends it."""
        return {
            "kill": self._kill,
            "stop": self._stop,
            "cut": self._worsen,
            "delay": self._worsen,
            "loss": self._worsen,
            "unplug": self._unplug,
            "reset": self._reset,
            "sever": self._sever,
            "fill": self._fill,
            "starve": self._starve,
        }[fault.kind](fault)

    def _kill(self, fault: Fault) -> Callable[[], None]:
        os.kill(self.parts[fault.victim], signal.SIGKILL)
        return _nothing

    def _stop(self, fault: Fault) -> Callable[[], None]:
        pid = self.parts[fault.victim]
        os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        return go_on

    def _worsen(self, fault: Fault) -> Callable[[], None]:
        quality = {
            "cut": Quality(loss=1.0),
            "delay": Quality(delay=0.05 + 0.3 * fault.strength, jitter=0.1 * fault.strength),
            "loss": Quality(loss=0.05 + 0.25 * fault.strength),
        }[fault.kind]
        self._cable.become(quality)
        return lambda: self._cable.become(GOOD)

    def _unplug(self, fault: Fault) -> Callable[[], None]:
        end = self.machines["a" if fault.strength < 0.5 else "b"].namespace
        ip("-n", end, "link", "set", end, "down")
        return lambda: ip("-n", end, "link", "set", end, "up")

    def _reset(self, fault: Fault) -> Callable[[], None]:
        end, other = ("a", "b") if fault.strength < 0.5 else ("b", "a")
        self._abort_connections(end, other)
        return _nothing

    def _sever(self, fault: Fault) -> Callable[[], None]:
        """Unplugged, and both ends know it."""
        plug_in = self._unplug(fault)
        try:
            self._abort_connections("a", "b")
            self._abort_connections("b", "a")
        except BaseException:
            plug_in()
            raise
        return plug_in

    def _abort_connections(self, end: str, other: str) -> None:
        if not self._run_on(end, "ss", "-HK", "dst", self.machines[other].address):
            raise NotInjectedError("this kernel aborts no connections for ss -K")

    def _fill(self, fault: Fault) -> Callable[[], None]:
        filler = self.machines[fault.machine].disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        self._run_on("a", sys.executable, "-c", _VISIT, *self.endpoint.rsplit(":", 1))
        return filler.unlink

    def _starve(self, fault: Fault) -> Callable[[], None]:
        pid = self.parts[fault.victim]
        before = resource.prlimit(pid, resource.RLIMIT_AS)
        taken = psutil.Process(pid).memory_info().vms
        resource.prlimit(pid, resource.RLIMIT_AS, (int(taken + fault.strength * (1 << 19)), before[1]))

        def feed() -> None:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_AS, before)

        return feed


def _nothing() -> None:
    pass


@contextmanager
def new_job(name: str, folder: Path) -> Iterator[Job]:
    """A job that is not started; whatever happens, nothing of it is left when the block is left."""
    folder.mkdir()
    machines = [
        Machine(each, f"{name}{each}", f"10.232.0.{number}", folder)
        for number, each in enumerate(MACHINES, 1)
    ]
    cable = None
    try:
        for machine in machines:
            ip("netns", "add", machine.namespace)
            machine.disk.mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "chaos", str(machine.disk)]
            subprocess.run(mount, check=True)
        cable = TunCable([(machine.namespace, machine.address) for machine in machines])
        yield Job(machines, cable, folder)
    finally:
        for machine in machines:
            _remove(machine)
        if cable is not None:
            cable.close()


def _remove(machine: Machine) -> None:
    with suppress(subprocess.CalledProcessError):  # the namespace was not made
        while processes := machine.processes():
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)
    if machine.launcher is not None:
        machine.launcher.wait()
    keep = machine.disk.with_name(f"{machine.disk.name}.kept")
    with suppress(OSError, shutil.Error):
        shutil.copytree(machine.disk, keep)
    subprocess.run(["umount", str(machine.disk)], capture_output=True)
    subprocess.run(["ip", "netns", "del", machine.namespace], capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def what_is_missing() -> str:
    """Why no such job can be had here; empty if it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need the rights of root"
    for program in ("ip", "ss", "unshare", "mount"):
        if shutil.which(program) is None:
            return f"the program {program} is not installed"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun cannot be used: {error.strerror}"
    return ""
