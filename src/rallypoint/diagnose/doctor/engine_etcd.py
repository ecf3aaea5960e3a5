"""The doctor's questions to etcd: its version, its members, its space, and if its history is compacted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import quote

from rallypoint.diagnose.doctor.engine_versions import parse_version
from rallypoint.diagnose.findings import Finding, failure, note, ok, unknown, warning
from rallypoint.errors import RallypointError
from rallypoint.store.replica.engines.address import EngineAddress
from rallypoint.text import counted, size

_COMPACTION: Final = "start etcd with --auto-compaction-mode=periodic --auto-compaction-retention=5m"
_DEFAULT_QUOTA: Final = 2 << 30
_FULL: Final = 0.8
_MANY_REVISIONS: Final = 5_000
"""A leader makes so many in half an hour, just by saying that it is alive."""
_INCONSISTENT: Final = ((3, 5, 0), (3, 5, 2))
_OLDEST: Final = (3, 4)


@dataclass(frozen=True)
class EtcdFacts:
    """What the nodes of a cluster say."""

    members: int
    """Of the cluster, also those that the URL does not name."""
    silent: Mapping[str, str]
    """The nodes of the URL that do not answer, and why."""
    versions: Sequence[str]
    """Of the nodes that answer, as the next ones."""
    has_leader: bool
    size: int
    """In bytes, the largest."""
    quota: int
    """0: they do not say."""
    alarms: Sequence[str]
    revision: int
    """Of the last change."""
    is_compacted: bool | None
    """Whether the first revision is forgotten; None: this user may not ask."""


def ask_etcd(address: EngineAddress) -> EtcdFacts:
    from rallypoint.store.replica.engines.etcd_client import EtcdClient  # late: it needs a package

    statuses, silent = [], {}
    for host in address.hosts:
        alone = replace(address, hosts=(host,))
        with closing(EtcdClient(alone)) as client:
            try:
                statuses.append(client.status())
            except RallypointError as error:
                silent[alone.places] = error.message.removeprefix(f"{alone}: ")
    key = f"/rallypoint/{quote(address.job, safe='')}/leader".encode()
    with closing(EtcdClient(address)) as client:
        return EtcdFacts(
            members=client.count_members(),
            silent=silent,
            versions=[each.version for each in statuses],
            has_leader=any(each.leader for each in statuses),
            size=max((each.size for each in statuses), default=0),
            quota=min((each.quota for each in statuses), default=0),
            alarms=[error for each in statuses for error in each.errors],
            revision=max((each.revision for each in statuses), default=0),
            is_compacted=_or_none(lambda: client.is_compacted(key, 1)),
        )


def _or_none(ask: Callable[[], bool]) -> bool | None:
    try:
        return ask()
    except RallypointError:
        return None


def judge_etcd(facts: EtcdFacts) -> Iterator[Finding]:
    for place, why in facts.silent.items():
        yield warning("engine", f"the node {place} does not answer: {why}", "start it, or mend its URL")
    versions = sorted({parse_version(each) for each in facts.versions})
    shown = ", ".join(sorted(set(facts.versions)))
    if any(_INCONSISTENT[0] <= each[:3] <= _INCONSISTENT[1] for each in versions):
        hint = "update it: 3.5.3 mends that (etcd issue 13766)"
        yield warning("engine", f"etcd {shown}: 3.5.0 to 3.5.2 may become inconsistent after a crash", hint)
    elif versions and versions[0][:2] < _OLDEST:
        yield warning(
            "engine", f"etcd {shown} has not been tried with Rallypoint", "update it to 3.4 or later"
        )
    else:
        yield ok("engine", f"etcd {shown}")
    yield _judge_members(facts)
    yield from _judge_space(facts)
    yield _judge_history(facts)


def _judge_members(facts: EtcdFacts) -> Finding:
    members = counted(facts.members, "member")
    if not facts.has_leader:
        hint = "more than half of its members have to be up, and reach each other"
        return failure("engine", f"{members}, and none of them leads: it takes no writes", hint)
    if facts.members == 1:
        return warning(
            "engine", f"{members}: when its machine dies, the store does", "run etcd on three machines"
        )
    if facts.members % 2 == 0:
        return note("engine", f"{members}, with a leader: one more would let one more of them fail")
    return ok("engine", f"{members}, with a leader")


def _judge_space(facts: EtcdFacts) -> Iterator[Finding]:
    for alarm in facts.alarms:
        hint = f"etcdctl compact, defrag, then alarm disarm; {_COMPACTION}" if "NOSPACE" in alarm else ""
        yield failure("engine", f"an alarm of etcd: {alarm.strip()}", hint or "see etcd's log, and its guide")
    quota = facts.quota or _DEFAULT_QUOTA
    of = f"{size(quota)}{'' if facts.quota else ', if its quota is the default'}"
    found = f"its database takes {size(facts.size)} of {of}"
    if facts.size > _FULL * quota:
        yield warning("engine", found, f"etcdctl defrag gives back what is free in it; {_COMPACTION}")
    else:
        yield ok("engine", found)


def _judge_history(facts: EtcdFacts) -> Finding:
    count = f"{facts.revision:,} revisions"
    if facts.is_compacted is None:
        return unknown(
            "engine", f"whether its history is compacted: this user may not ask; {count}", _COMPACTION
        )
    if facts.is_compacted:
        return ok("engine", f"its history is compacted, or was once; {count}")
    if facts.revision < _MANY_REVISIONS:
        found = f"its history has not been compacted yet: with {count}, that says nothing"
        return note("engine", found, f"it has to be, or it fills up: {_COMPACTION}")
    return warning(
        "engine", f"its history is not compacted: all {count} are kept, and fill it up", _COMPACTION
    )
