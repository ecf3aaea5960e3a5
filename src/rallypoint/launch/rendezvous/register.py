"""The roster of a rendezvous in a store: how it is read, and how it is changed.

Each machine appends its request to a key, the desk, and adds 1 to a counter. That is all that most machines
do. One of them reads all new requests, applies them by the rules of `roster`, writes the new roster under a
key of its own, with the ring of all machines beside it, and replaces the digest, which names that key, by
compare-and-set. A machine that is too late has changed nothing, and tries again if its requests are still
pending. The writer then notifies the machines that wait for the change, each at its own key.

Nobody has a lock. A machine may die at any point: another one applies what it has appended, what it had read
is read again, and machines that it has not notified find out from the digest.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rallypoint.client.base import NOTHING, PrefixStore, Store, seen
from rallypoint.client.tcp import TCPStore
from rallypoint.codec import from_text, to_text
from rallypoint.errors import RallypointError, StoreTimeoutError
from rallypoint.launch.rendezvous.digest import (
    Assignment,
    Digest,
    RoundEnd,
    arc_of,
    arcs,
    assignment_of_refused,
    end_of,
    notices,
)
from rallypoint.launch.rendezvous.roster import (
    Ending,
    Member,
    Refusals,
    Roster,
    RosterRequest,
    Size,
    read_requests,
    read_value,
    unreadable,
)
from rallypoint.store.rollcall.identity import Role

Rule = Callable[[Roster], Roster]

_DIGEST = "roster"
_REQUESTS = "lines"
_CLOSED = "closed"
_DESK, _BEAT, _END = "desk/{}", "beat/{}", "end/{}"
_DESK_BYTES = 1 << 22
_NOTICE = "member.json"
_NOTICE_SECONDS = 3.0
_LAST_VISIT = 1 << 31  # later than any of the agent's own
_MANY = 8  # requests are many if they are this part of the machines


class Register:
    """One machine's access to the roster. Safe to use from several threads."""

    def __init__(self, store: Store, member_id: str, size: Size) -> None:
        self._store = store
        self._member_id = member_id
        self._size = size
        self._lock = threading.RLock()
        self._text = b""  # the digest as it was last read
        self._digest = Digest()
        self._names = ""  # the key of the roster that was last read
        self._roster = Roster()
        self._number = 0  # of the last request, when it was last looked for requests
        self._ring = ""  # the key of the roster whose ring was last read
        self._arcs: dict[int, tuple[str, ...]] = {}  # what was read of it

    # Reading

    def digest(self) -> Digest:
        """The latest digest: one small request."""
        with self._lock:
            self._note(self._read(_DIGEST))
            return self._digest

    def roster(self) -> Roster:
        """The latest roster, with all requests taken in. As long as the names of all machines."""
        with self._lock:
            self.sweep()
            while not self._load():
                pass
            return self._roster

    def ring(self, digest: Digest) -> Iterator[str]:
        """The ids of all others, beginning with the next one; none if this machine is not in the roster.

        Of a digest that is not the latest any more, some may be left out. What is far away is read only when
        it is asked for.
        """
        if not digest.arcs:
            return
        own = arc_of(self._member_id, digest.arcs)
        here = self._arc(digest, own)
        if self._member_id not in here:
            return
        place = here.index(self._member_id)
        yield from here[place + 1 :]
        for number in range(own + 1, own + digest.arcs):
            yield from self._arc(digest, number % digest.arcs)
        yield from here[:place]

    def _arc(self, digest: Digest, number: int) -> tuple[str, ...]:
        with self._lock:
            if self._ring != digest.names:
                self._ring, self._arcs = digest.names, {}
            if number not in self._arcs:
                self._arcs[number] = read_value(
                    tuple[str, ...], self._read(f"{digest.names}/{number}") or b"[]"
                )
            return self._arcs[number]

    # Changing

    def post(self, request: RosterRequest) -> Digest:
        """Post a request; and apply it, if others are to learn of it at once."""
        with self._lock:
            desk = -2
            while self._digest.desk > desk + 1:  # nobody reads that one any more
                desk = self._digest.desk
                number = self._add(
                    _REQUESTS, 1, after=(_DESK.format(desk), to_text(request, sparse=True) + "\n")
                )
            if self._digest.is_due(number, self._size):
                self._fold(number)
            return self._digest

    def sweep(self, least: int = 1) -> Digest:
        """Apply the pending requests, if there are at least that many; the latest digest."""
        with self._lock:
            number = self._add(_REQUESTS, 0)
            if number - self._digest.folded >= least:
                self._fold(number)
            return self._digest

    def fold_pending(self) -> Digest:
        """Apply the pending requests, if there are many, or no new ones since the last call.

        To apply a few takes as long as to apply all: a machine that did so every second, while others keep
        joining for minutes, would write the names of all of them hundreds of times.
        """
        with self._lock:
            before, self._number = self._number, self._add(_REQUESTS, 0)
            untaken = self._number - self._digest.folded
            if untaken > 0 and (self._number == before or untaken * _MANY >= self._digest.everybody):
                self._fold(self._number)
            return self._digest

    def change(self, rule: Rule) -> Roster:
        """Take in all requests, and apply a rule to what comes out."""
        with self._lock:
            self.digest()
            while not self._try(rule):
                pass
            return self._roster

    # Signs of life

    def beat(self) -> Digest:
        """Give a sign of life; the latest digest."""
        with self._lock:
            self._add(_BEAT.format(self._member_id), 1)
            return self._digest

    def beats_of(self, member_id: str) -> int:
        """How many signs of life a machine has given."""
        return self._store.add(_BEAT.format(member_id), 0)

    def beats_of_all(self, ids: Sequence[str]) -> dict[str, bytes]:
        """The same of several machines, in one request, but as text."""
        keys = [_BEAT.format(each) for each in ids]
        if not self._store.check(keys):  # one may have been killed before its first sign
            for each in ids:
                self.beats_of(each)
        return dict(zip(ids, self._store.multi_get(keys), strict=True))

    # Waiting

    def await_assignment(self, member: Member, seconds: float) -> Assignment | None:
        """The assignment of this machine; None if there is none within `seconds`."""
        key = _assignment_key(member)
        return read_value(Assignment, self._read(key)) if self._await(key, seconds) else None

    def recall(self, members: tuple[Member, ...]) -> None:
        """Have machines that count as lost join again, if they still run."""
        keys = [_assignment_key(each) for each in members]
        self._store.multi_set(keys, [to_text(Assignment(again=True), sparse=True)] * len(keys))

    def forget_assignment(self, member: Member) -> None:
        self._store.delete_key(_assignment_key(member))

    def await_end(self, number: int, seconds: float) -> RoundEnd | None:
        """How the round of that number has ended; None if it has not within `seconds`."""
        key = _END.format(number)
        return read_value(RoundEnd, text) if self._await(key, seconds) and (text := self._read(key)) else None

    def await_closed(self, seconds: float) -> None:
        """Wait until the meeting is closed, no longer than that."""
        self._await(_CLOSED, seconds)

    def _await(self, key: str, seconds: float) -> bool:
        try:
            self._store.wait([key], max(seconds, 0.001))
        except StoreTimeoutError:
            return False
        return True

    # The keys

    def _read(self, key: str) -> bytes:
        """A value, without waiting for it; nothing if there is none."""
        return seen(self._store.compare_set(key, NOTHING, NOTHING))

    def _add(self, counter: str, amount: int, after: tuple[str, str] | None = None) -> int:
        """Add to a counter, and read the digest."""
        number, text = self._store.add_and_look(counter, amount, _DIGEST, after=after)
        self._note(text)
        return number

    def _note(self, text: bytes) -> None:
        if text != self._text:
            self._text, self._digest = text, read_value(Digest, text) if text else Digest()

    def _load(self) -> bool:
        """Whether the roster that the digest names is read; it may be an older one by now, and deleted."""
        if self._digest.names != self._names:
            names, text = self._digest.names, self._read(self._digest.names)
            if not text and self.digest().names == names:
                raise unreadable(f"{names} is missing")
            if not text:
                return False
            self._names, self._roster = names, read_value(Roster, text)
        return True

    def _fold(self, number: int) -> None:
        """Apply requests, up to that number at least, unless another machine has done so."""
        while self._digest.folded < number:
            self._try(lambda roster: roster)
            # Who wrote a request meanwhile may have read the digest before, and not know that it is due.
            latest = self._store.add(_REQUESTS, 0)
            untaken = range(self._digest.folded + 1, latest + 1)
            if any(self._digest.is_due(each, self._size) for each in untaken):
                number = latest

    def _try(self, rule: Rule) -> bool:
        """Whether a rule has been applied to the latest roster; another machine may have been quicker."""
        if not self._load():
            return False
        before = self._roster
        read, refused = self._with_requests(before)
        after = rule(read)
        if after == before:
            return True
        if not self._write(after):
            return False
        self._notify(before, after, refused)
        return True

    def _with_requests(self, before: Roster) -> tuple[Roster, Refusals]:
        """The roster with all requests applied; a request is counted after it has been written."""
        number = self._store.add(_REQUESTS, 0)
        if number <= before.folded:
            return before, {}
        late = self._read(_DESK.format(before.desk - 1))[before.read_before :]
        requests = self._read(_DESK.format(before.desk))[before.read :]
        read, read_before = before.read + len(requests), before.read_before + len(late)
        noted = replace(before, folded=number, read=read, read_before=read_before)
        after, refused = noted.apply(read_requests(late + requests), self._size)
        return (after.at_next_desk() if after.read > _DESK_BYTES else after), refused

    def _write(self, after: Roster) -> bool:
        before, desk = self._digest, self._roster.desk
        names = f"names/{self._member_id}/{before.version + 1}"
        ring = [json.dumps(each) for each in arcs(after)]
        keys = [names, *(f"{names}/{number}" for number in range(len(ring)))]
        self._store.multi_set(keys, [to_text(after), *ring])
        text = to_text(Digest.of(after, self._size, before, names)).encode()
        found = self._store.compare_set(_DIGEST, self._text, text)
        self._note(found)
        is_written = found == text
        if is_written:
            self._names, self._roster = names, after
            old = before.names_before
            keys = [old, *(f"{old}/{number}" for number in range(before.arcs_before))] if old else []
            keys += map(_DESK.format, range(desk - 1, after.desk - 1))
        for key in keys:
            self._store.delete_key(key)
        return is_written

    def _notify(self, before: Roster, after: Roster, refused: Refusals) -> None:
        """Notify the machines that wait for a change, each at its own key."""
        assignments = dict(notices(before, after, time.time()))
        assignments |= {each: assignment_of_refused(error) for each, error in refused.items()}
        texts = {
            _assignment_key(each): to_text(assignment, sparse=True)
            for each, assignment in assignments.items()
        }
        if end := end_of(before, after):
            texts[_END.format(before.round)] = to_text(end, sparse=True)
            self._store.delete_key(_END.format(before.round - 1))
        if after.closed and not before.closed:
            texts[_CLOSED] = ""
        elif before.closed and not after.closed:  # it is another job's
            self._store.delete_key(_CLOSED)
        if texts:
            self._store.multi_set(list(texts), list(texts.values()))


@dataclass(frozen=True)
class DeathNotice:
    """What an agent leaves to its launcher: how to report to the rendezvous that it was killed.

    A launcher sees at once that its agent was killed. The other machines would miss it after some seconds
    without a sign of life.
    """

    host: str
    port: int
    prefix: str
    member: Member
    size: Size

    def leave_to(self, folder: Path) -> None:
        (folder / _NOTICE).write_text(to_text(self), encoding="utf-8")


def post_death_notice(folder: Path, how: str) -> None:
    """Report how the agent of this folder has ended. Does nothing if it had not joined a rendezvous."""
    try:
        left = from_text(DeathNotice, (folder / _NOTICE).read_text(encoding="utf-8"))
        with TCPStore(left.host, left.port, timeout=_NOTICE_SECONDS, role=Role.AGENT) as store:
            register = Register(PrefixStore(left.prefix, store), left.member.id, left.size)
            leave = replace(left.member, visit=_LAST_VISIT)
            ending = Ending(f"torchrun's agent on {left.member} has ended {how}", time.time())
            register.post(RosterRequest(leave=leave, lost=True, ending=ending))
    except (OSError, ValueError, RallypointError):
        pass  # then it is missed, after a while


def _assignment_key(member: Member) -> str:
    return f"seat/{member.id}/{member.visit}"
