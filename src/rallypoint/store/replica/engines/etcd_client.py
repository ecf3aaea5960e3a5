"""Calls of etcd's API by gRPC: on one node after the other, each with a deadline, and with a user or TLS."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Final

import grpc

from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import format_address
from rallypoint.store.replica.engines import etcd_messages as messages
from rallypoint.store.replica.engines.address import PASSWORD_HINT, EngineAddress, Tls
from rallypoint.store.replica.engines.etcd_messages import Outcome, Status, decode, encode, read_status
from rallypoint.store.replica.log import EngineAwayError, EngineRefusedError

SECONDS_PER_CALL: Final = 2.0
"""How long nodes are tried, one after the other."""

SECONDS_PER_TRY: Final = 1.0
"""How long one node has to answer. One that is paused or gone says nothing."""

_PAUSE: Final = 0.05
"""Seconds before all nodes are tried again."""

_OPTIONS: Final = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # of one try to connect
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]

_PASSING: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
"""Of a node that is away, or that has no leader now."""

_OLD_TOKEN: Final = re.compile(r"invalid auth token|revision of auth store is old")
_FULL: Final = (
    "its database is full: compact and defragment it, then disarm the alarm (etcdctl compact, defrag, alarm "
    "disarm); --auto-compaction-mode=periodic --auto-compaction-retention=5m keeps it small"
)


class EtcdClient:
    """A cluster, or one node."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self._channels = [_open(format_address(*each), address.tls) for each in address.hosts]
        self._current = 0
        self._token = ""
        self._closed = threading.Event()

    def transact(self, request: bytes, *, seconds: float = SECONDS_PER_TRY) -> Outcome:
        return messages.read_outcome(self._call("KV/Txn", request, seconds))

    def compact(self, revision: int) -> None:
        self._call("KV/Compact", encode((1, revision)))

    def grant_lease(self, seconds: int) -> int:
        return decode(self._call("Lease/LeaseGrant", encode((1, seconds)))).integer(2)

    def status(self, *, seconds: float = SECONDS_PER_TRY) -> Status:
        """Of the node that answers now."""
        return read_status(self._call("Maintenance/Status", b"", seconds))

    def count_members(self) -> int:
        return len(decode(self._call("Cluster/MemberList", b"")).messages(2))

    def is_compacted(self, key: bytes, revision: int) -> bool:
        """Whether what was at this revision is forgotten. The user has to be allowed to read the key."""
        try:
            self._call("KV/Range", encode((1, key), (4, revision)))
        except EngineRefusedError as error:
            if "compacted" in error.message:
                return True
            raise
        return False

    def close(self) -> None:
        self._closed.set()
        for channel in self._channels:
            channel.close()

    def _call(self, method: str, request: bytes, seconds: float = SECONDS_PER_TRY) -> bytes:
        if not self._address.user:
            return self._ask(method, request, seconds)
        try:
            return self._ask(method, request, seconds, self._token or self._authenticate())
        except _OldTokenError:
            return self._ask(method, request, seconds, self._authenticate())

    def _authenticate(self) -> str:
        """A new token. It is asked for without the old one, for which etcd would refuse this, too."""
        request = encode((1, self._address.user.encode()), (2, self._address.password.encode()))
        self._token = decode(self._ask("Auth/Authenticate", request, SECONDS_PER_TRY)).data(2).decode()
        return self._token

    def _ask(self, method: str, request: bytes, seconds: float, token: str = "") -> bytes:
        """Ask one node after the other until one answers.

        A request may be carried out more than once, and long after this has given up: by a node that was
        paused. All that is asked here allows for that.
        """
        deadline = Deadline(max(SECONDS_PER_CALL, seconds))
        tries = 0
        while not self._closed.is_set():
            chosen = self._current
            left = max(deadline.remaining, 0.1)
            try:
                return self._ask_node(chosen, method, request, min(seconds, left), token)
            except grpc.RpcError as error:
                failure = self._judge(error)
            except ValueError:  # gRPC's word for a channel that is closed
                break
            if self._current == chosen:
                self._current = (chosen + 1) % len(self._channels)
            tries += 1
            if deadline.passed:
                raise failure
            if tries % len(self._channels) == 0:
                self._closed.wait(_PAUSE)
        raise EngineAwayError(f"{self._address}: the connection was closed")

    def _ask_node(self, chosen: int, method: str, request: bytes, seconds: float, token: str) -> bytes:
        # Without `hasleader`, a node that knows no leader lets callers wait.
        metadata = (("hasleader", "true"), *((("token", token),) if token else ()))
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        call = self._channels[chosen].unary_unary(f"/etcdserverpb.{method}")
        return call(request, timeout=seconds, metadata=metadata)

    def _judge(self, error: grpc.RpcError) -> EngineAwayError:
        """The error to raise if no other node does better. If none will, it is raised here."""
        assert isinstance(error, grpc.Call)
        code, details = error.code(), " ".join((error.details() or "").split())
        if _OLD_TOKEN.search(details):
            raise _OldTokenError(f"{self._address}: no answer: {details}")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            hint = _FULL if "space exceeded" in details else ""
            return EngineAwayError(f"{self._address}: it cannot write now: {details}", hint=hint)
        if code in _PASSING:
            return EngineAwayError(f"{self._address}: no answer: {details or code.name}")
        hint = PASSWORD_HINT if "user" in details else ""
        if "permission denied" in details:
            hint = f"its user needs to read and write below /rallypoint/; {PASSWORD_HINT}"
        raise EngineRefusedError(f"{self._address}: it refuses: {details or code.name}", hint=hint)


class _OldTokenError(EngineAwayError):
    """What the user was let in by is over: tokens are after some minutes, and when a node was restarted."""


def _open(target: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(target, options=_OPTIONS)
    ca, cert, key = (Path(path).read_bytes() if path else None for path in (tls.ca, tls.cert, tls.key))
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options=_OPTIONS)
