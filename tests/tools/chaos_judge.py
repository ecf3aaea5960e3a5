"""The life of one job of `chaos.py`: its faults, one after the other, and what must hold after each.

Either the job goes on and its ranks find every counter as it must be; or every rank ends within its time-out,
and both launchers name the cause. In the end nothing of the job may be left: no process and no file.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chaos_job import Job, NotInjectedError, new_job
from chaos_plan import MACHINES, RANKS, TIMEOUT, Fault, Verdict, plan

_SLACK: Final = 10.0
"""What ranks may need beyond their time-out, on a busy machine."""
_START_SECONDS: Final = 60.0
_PARTING_SECONDS: Final = 60.0
"""For launchers and servers, once the ranks have ended: they wait for each other, and for relays."""
_STEPS_BEYOND: Final = 3
PEACE: Final = "end in peace"
"""In place of a fault: the job is told to end."""

_WORDS_OF_SURVIVAL: Final = {
    "fill disk-a": (
        r"cannot write events to .*: No space left",
        r"events are written to .* again; \d+ event",
    ),
}
"""What the first machine has to say, though the job goes on."""


class WrongError(Exception):
    """Something has happened that must not be."""


class HaltedError(Exception):
    """The program was told to end."""


@dataclass(frozen=True)
class Outcome:
    """What came of one fault."""

    job: int
    group: str
    fault: str
    outcome: str
    """`went on`, `ended`, `not injected`; or `failed`, if what came of it is wrong."""
    seconds: float
    """From the end of the fault until the job went on, or from its beginning until all ranks had ended."""
    why: str = ""


class Life:
    """One job from its start to its end."""

    def __init__(
        self,
        seed: int,
        number: int,
        halt: threading.Event,
        is_over: Callable[[], bool],
        tell: Callable[[Outcome], None],
    ) -> None:
        """Once it is over, no fault is begun; what came of one is told at once."""
        self._number = number
        self._faults = plan(seed, number)
        self._halt = halt
        self._is_over = is_over
        self._began = 0.0
        self._ends: dict[str, float] = {}
        self._said: dict[str, int] = {}
        self._tell = tell

    def live(self, name: str, folder: Path) -> bool:
        """Whether all was right; else the last outcome says what was not, and the folder has the logs."""
        group = text = "start"
        self._began = time.monotonic()
        with new_job(name, folder) as job:
            try:
                job.start()
                self._await(lambda: min(job.steps()) >= _STEPS_BEYOND, _START_SECONDS, "it does not come up")
                job.find_parts()
                for fault in self._faults:
                    if self._is_over():
                        break
                    group, text = fault.group, str(fault)
                    if self._suffer(job, fault):
                        return True
                group = text = PEACE
                self._part(job)
            except WrongError as error:
                self._note(group, text, "failed", time.monotonic() - self._began, str(error))
                return False
        return True

    def _note(self, group: str, fault: str, outcome: str, seconds: float, why: str = "") -> None:
        self._tell(Outcome(self._number, group, fault, outcome, round(seconds, 1), why))

    def _await(self, condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise WrongError(f"{otherwise} within {seconds:.0f} s")
            self._pause()

    def _pause(self) -> None:
        if self._halt.wait(0.1):
            raise HaltedError

    # A fault

    def _suffer(self, job: Job, fault: Fault) -> bool:
        """Whether the job has ended by it."""
        self._await_steps(job, Verdict.GOES_ON)
        self._halt.wait(fault.after)
        self._began = time.monotonic()
        self._ends = {}
        self._said = {machine: len(job.machines[machine].read_log()) for machine in MACHINES}
        try:
            mend = job.inject(fault)
        except NotInjectedError as error:
            self._note(fault.group, str(fault), "not injected", 0.0, str(error))
            return False
        try:
            while time.monotonic() < self._began + fault.seconds:
                self._see_who_ends(job)
                self._pause()
        finally:
            mend()
        mended = time.monotonic()
        if fault.verdict is not Verdict.ENDS and self._await_steps(job, fault.verdict):
            seconds = time.monotonic() - mended
            words = _WORDS_OF_SURVIVAL.get(f"{fault.kind} {fault.victim}", ())
            self._await(
                lambda: all(self._says(job, "a", word) for word in words), _SLACK, f"nobody says {words}"
            )
            self._note(fault.group, str(fault), "went on", seconds)
            return False
        self._check_end(job, fault)
        self._note(fault.group, str(fault), "ended", max(self._ends.values()))
        return True

    def _await_steps(self, job: Job, verdict: Verdict) -> bool:
        """Wait until all ranks have taken some steps more. False: the job has ended, which it may."""
        wanted = max(job.steps()) + _STEPS_BEYOND

        def has_ended() -> bool:
            return job.exit_codes() != [None, None] or not all(map(job.runs, RANKS))

        seconds = TIMEOUT + _SLACK
        self._await(
            lambda: min(job.steps()) >= wanted or has_ended(), seconds, f"it hangs at {job.steps()}: no step"
        )
        if min(job.steps()) >= wanted:
            return True
        if verdict is Verdict.GOES_ON:
            errors = [f"{rank}: {error}" for rank in RANKS if (error := job.error_of(rank))]
            raise WrongError("; ".join(["it has ended, but should go on", *errors[:1]]))
        return False

    def _see_who_ends(self, job: Job) -> bool:
        """Note when ranks end; whether all have."""
        for rank in RANKS:
            if rank not in self._ends and not job.runs(rank):
                self._ends[rank] = time.monotonic() - self._began
        return len(self._ends) == len(RANKS)

    # An end

    def _check_end(self, job: Job, fault: Fault) -> None:
        longest = max(TIMEOUT, fault.seconds) + _SLACK
        self._await(lambda: self._see_who_ends(job), longest, f"ranks run on, {list(self._ends)} do not")
        for rank, seconds in self._ends.items():
            allowed = (fault.seconds if rank == fault.victim else 0.0) + TIMEOUT + _SLACK
            if seconds > allowed:
                raise WrongError(f"{rank} has ended after {seconds:.0f} s, but should within {allowed:.0f} s")
            if job.is_done(rank):
                raise WrongError(f"{rank} has ended well, but the job was not over")
        self._await(lambda: None not in job.exit_codes(), _PARTING_SECONDS, "a launcher does not end")
        if 0 in job.exit_codes():
            raise WrongError(f"the launchers ended with {job.exit_codes()}")
        self._check_words(job, fault)
        self._check_rest(job, fault)

    def _says(self, job: Job, machine: str, pattern: str) -> bool:
        """Whether a machine's log has a text, since the fault began."""
        return bool(re.search(pattern, job.machines[machine].read_log()[self._said[machine] :]))

    def _check_words(self, job: Job, fault: Fault) -> None:
        """Every rank's own error, and both launchers, name the cause."""
        causes = causes_of(job, fault)
        for machine, cause in causes.items():
            if not self._says(job, machine, cause):
                raise WrongError(f"the launcher on node-{machine} does not say /{cause}/")
        for rank in RANKS:
            error = job.error_of(rank)
            if "WrongAnswerError" in error:
                raise WrongError(f"{rank}: {error.splitlines()[-1]}")
            if error and not re.search(f"{job.store}|on node-[ab]|MemoryError", error):
                raise WrongError(f"the error of {rank} names no cause: {error.splitlines()[-1]}")

    def _part(self, job: Job) -> None:
        """End in peace: all ranks have done the same number of steps, with every counter right."""
        self._began = time.monotonic()
        job.tell_to_end()
        self._await(lambda: None not in job.exit_codes(), TIMEOUT + _PARTING_SECONDS, "it does not end")
        if job.exit_codes() != [0, 0] or not all(map(job.is_done, RANKS)):
            raise WrongError(f"the launchers ended with {job.exit_codes()}, but nothing had happened to them")
        seconds = time.monotonic() - self._began
        self._check_rest(job, None)
        self._note(PEACE, PEACE, "went on", seconds)

    def _check_rest(self, job: Job, fault: Fault | None) -> None:
        self._await(lambda: not job.processes(), _PARTING_SECONDS, "processes are left")
        if fault is not None and fault.victim.startswith("launcher"):
            job.clean_disk(fault.machine)
        files = job.files_left()
        if files:
            raise WrongError(f"files are left: {files}")
        for path in job.event_files():
            for line in path.read_text().splitlines():
                try:
                    json.loads(line)
                except ValueError:
                    raise WrongError(f"a line of {path} is torn: {line[:80]}") from None


def causes_of(job: Job, fault: Fault) -> dict[str, str]:
    """What the log of each machine has to say, as a pattern; not of one whose launcher was killed."""
    here = fault.machine or "b"  # a link that is cut: the store is on the other side
    there = MACHINES[1 - MACHINES.index(here)]
    who = rf"\(process {job.parts.get(fault.victim)} on node-{here}"
    missing = rf"(missing there: [0-9, toand]+|the relay at \S+) on node-{here}"
    lost = rf"{missing}|lost before: machine rank \d on node-{here}"
    rank = fault.victim.partition("-")[2]
    own, other = {
        "kill store": (
            rf"the job's store {who}.*\) has ended by signal SIGKILL",
            rf"\nrallypoint: the job's store at {job.endpoint} cannot be reached any more",
        ),
        "kill relay": (
            rf"this machine's relay to the job's store {who}.*\) has ended by signal SIGKILL",
            missing,
        ),
        # Its agent leaves in good order, and the other machine waits for another one in vain.
        "kill launcher": ("", lost),
        "kill agent": (
            rf"torchrun's agent {who}\) has ended by signal SIGKILL",
            rf"torchrun's agent on .*node-{here} .*has ended by signal SIGKILL",
        ),
        "kill rank": (rf"rank {rank} {who}\) ended by SIGKILL",) * 2,
        "stop store": (job.store, job.store),
        "stop relay": (job.store, missing),
        "stop rank": (missing, missing),
        "cut link": (job.store, lost),
        "unplug link": (job.store, lost),
        "sever link": (
            rf"{job.endpoint} is lost: no connection for \d+ s, the limit session_seconds",
            lost,
        ),
        "starve store": ("out of memory|MemoryError", job.store),
        "starve relay": ("out of memory|MemoryError", missing),
        "starve agent": ("out of memory|MemoryError|has ended by signal", missing),
        "starve rank": ("MemoryError", missing),
    }[f"{fault.kind} {fault.victim.partition('-')[0]}"]
    return {machine: cause for machine, cause in ((here, own), (there, other)) if cause}
