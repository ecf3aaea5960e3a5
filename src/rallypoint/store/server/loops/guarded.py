"""The door of a server that has a secret: clients of other machines prove it under TLS.

Ranks speak plain TCP and have no proof, but connect from this machine, as they do to a relay. The first byte
tells TLS from plain TCP.

Anybody can ask for a TLS handshake. One costs a quarter of a millisecond of CPU time or more, and some 45 KB
until it is complete. So handshakes run in short slices between the requests of other clients, and only a
limited number is under way. Addresses take turns. Within an address the newest message comes first: a
handshake continues before others begin, and a client that arrives after a flood need not wait for all of it.
"""

from __future__ import annotations

import socket
from typing import Any, Final

from rallypoint.errors import AccessError, ProtocolError
from rallypoint.store.core.clients import ClientT
from rallypoint.store.server.guard.secret import Secret
from rallypoint.store.server.guard.tls import Channel, server_channel, server_tls
from rallypoint.store.server.loops.link import NOT_NOW, Link, LinkOwner, Socket, read_some
from rallypoint.store.server.loops.loop import Loop, Sliced
from rallypoint.store.wire.opcodes import LOCKED, TLS_BYTE
from rallypoint.store.wire.preface import Right

_READ_BYTES: Final = 1 << 15
_MOST_UNDER_WAY: Final = 1024
_MOST_OF_ONE_ADDRESS: Final = 512


class Door:
    """Lets clients in that prove the secret."""

    def __init__(self, secret: Secret, loop: Loop) -> None:
        """UsageError if no certificate can be had."""
        self._secret = secret
        self._tls = server_tls()
        # By address, the newest last. The links are keys, as they are removed from anywhere.
        self._waiting: dict[str, dict[GuardedLink[Any], None]] = {}
        self._under_way: dict[str, dict[GuardedLink[Any], None]] = {}
        self._work = Sliced(loop, self._shake_next)

    def link(
        self, pump: LinkOwner[ClientT], sock: Socket, client: ClientT, *, is_here: bool
    ) -> Link[ClientT]:
        """The link of a new client; `is_here`: from this machine."""
        return GuardedLink(pump, sock, client, self, is_here=is_here)

    def begin(self, link: GuardedLink[Any]) -> Channel:
        """The channel for a new handshake. Of too many, the oldest of the busiest address is closed."""
        of_address = self._under_way.setdefault(link.address, {})
        if len(of_address) >= _MOST_OF_ONE_ADDRESS:
            next(iter(of_address)).give_way()
        elif sum(map(len, self._under_way.values())) >= _MOST_UNDER_WAY:
            busiest = max(self._under_way.values(), key=len)
            next(iter(busiest)).give_way()
        self._under_way.setdefault(link.address, {})[link] = None
        return server_channel(self._tls, self._secret)

    def enqueue(self, link: GuardedLink[Any]) -> None:
        """Continue this handshake when it is its turn."""
        self._waiting.setdefault(link.address, {})[link] = None
        self._work.go_on()

    def forget(self, link: GuardedLink[Any]) -> None:
        """Drop a handshake that has ended, one way or the other."""
        for table in (self._waiting, self._under_way):
            links = table.get(link.address, {})
            links.pop(link, None)
            if not links:
                table.pop(link.address, None)

    def _shake_next(self) -> bool:
        if self._waiting:
            address = next(iter(self._waiting))
            links = self._waiting.pop(address)
            link, _ = links.popitem()
            if links:
                self._waiting[address] = links  # after the other addresses
            link.shake_hands()
        return bool(self._waiting)


class GuardedLink(Link[ClientT]):
    """A client that speaks TLS, or has not sent its first byte yet."""

    __slots__ = ("_channel", "_door", "_is_broken", "_is_here", "address")

    def __init__(
        self, pump: LinkOwner[ClientT], sock: Socket, client: ClientT, door: Door, *, is_here: bool
    ) -> None:
        super().__init__(pump, sock, client)
        self._door = door
        self._is_here = is_here
        self.address = client.peer.rpartition(":")[0]
        self._channel: Channel | None = None
        self._is_broken = False  # TLS can carry nothing more

    def move(self, pump: LinkOwner[ClientT], client: ClientT) -> None:
        if self._channel is not None and self._channel.right is not Right.ALL:
            client.restrict_to_snapshots()
        super().move(pump, client)

    def on_readable(self, data: bytes | None = None) -> None:
        """As a plain link, over TLS. A handshake waits for its turn."""
        if data is None and self._wants_handshake():
            self._pump.loop.watch_readable(self.sock, None)
            self._door.enqueue(self)
        else:
            self._serve(data)

    def shake_hands(self) -> None:
        """Continue the handshake, now that it is its turn."""
        self._serve()
        self._pump.watch(self)

    def give_way(self) -> None:
        """Close this client, whose incomplete handshake is the oldest of too many."""
        self._pump.note_error(self.client, "its TLS handshake was the oldest of too many that are incomplete")
        self._pump.drop(self)

    def close(self) -> None:
        self._door.forget(self)
        super().close()

    def _wants_handshake(self) -> bool:
        if self._channel is not None:
            return not self._channel.is_open
        try:
            return self.sock.recv(1, socket.MSG_PEEK) == bytes([TLS_BYTE])
        except OSError:  # as a read will find
            return False

    def _serve(self, data: bytes | None = None) -> None:
        try:
            said = self._read() if data is None else data
            if said is None:
                return
            reply = self._receive(said)
            if reply:
                self.send(reply)
            else:
                self._unanswered.add(self)
        except ProtocolError as error:
            if self._is_broken:
                self._pump.note_error(self.client, error.message)
                self._pump.drop(self)
            else:
                self._pump.refuse(self, error)
            return
        except Exception:
            self.fail()
        if self._woken or self._others:
            self._pump.deliver()

    def send(self, data: bytes) -> None:
        try:
            sealed = data if self._channel is None else self._channel.seal(data)
        except Exception:
            self.fail()
        else:
            self.send_now(sealed)

    def _read(self) -> bytes | None:
        """What the client has sent to the core; None if nothing has come."""
        try:
            data = read_some(self._file, _READ_BYTES)
        except OSError as error:
            if not isinstance(error, NOT_NOW):
                self._pump.drop(self)
            return None
        if not data:
            self._pump.end(self)
            return None
        if self._channel is None:
            if data[0] != TLS_BYTE:
                self._admit(data)
                return None
            self._channel = self._door.begin(self)
        channel, was_open = self._channel, self._channel.is_open
        try:
            said = channel.receive(data)
        except AccessError:
            self._is_broken = True
            raise
        finally:
            if going := channel.take():
                self.send_now(going)
        if self.sock.fileno() < 0:  # sending has failed
            return None
        if channel.is_open and not was_open:
            self._door.forget(self)
            if channel.right is not Right.ALL:
                self.client.restrict_to_snapshots()
                self._receive = self.client.receive
        if channel.has_ended and not said:
            self._pump.end(self)
        return said or None

    def _admit(self, data: bytes) -> None:
        if self._is_here:
            self._pump.admit(self, data)
            return
        error = AccessError(
            "it comes from another machine without the job's secret, and this store takes nobody without"
        )
        error.replies = LOCKED
        raise error
