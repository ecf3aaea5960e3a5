"""What one machine asks for, done to a roster at once."""

from __future__ import annotations

from rallypoint.launch.rendezvous.roster import Ending, Member, Roster, RosterRequest, Size

_LAST_VISIT = 1 << 30


def join(roster: Roster, member: Member, size: Size) -> Roster:
    """Raises the error with which the machine is refused."""
    line = RosterRequest(come=member, least=size.least, most=size.most)
    after, refused = roster.apply([line], size)
    for error in refused.values():
        raise error
    return after


def leave(roster: Roster, name: str, size: Size, ending: Ending | None = None) -> Roster:
    line = RosterRequest(leave=Member(name, "", 1, visit=_LAST_VISIT), ending=ending)
    return roster.apply([line], size)[0]


def close(roster: Roster, reason: str, size: Size) -> Roster:
    return roster.apply([RosterRequest(close=reason)], size)[0]
