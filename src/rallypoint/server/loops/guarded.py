"""The door of a server that has a secret: TLS with a proof of it, or a client of this machine.

Ranks speak plain TCP, and have nothing to show: they come from this machine, as those of a relay do. Whoever
comes from another machine has to prove that it has the secret. The first byte tells which it is.
"""

from __future__ import annotations

from rallypoint.errors import AccessError, ProtocolError
from rallypoint.server.core.clients import ClientT
from rallypoint.server.guard.certificate import server_tls
from rallypoint.server.guard.channel import Channel, server_channel
from rallypoint.server.guard.secret import Secret
from rallypoint.server.loops.link import NOT_NOW, Link, LinkOwner, Socket, read_some
from rallypoint.wire.opcodes import LOCKED, TLS_BYTE
from rallypoint.wire.preface import Right

_READ_BYTES = 1 << 15


class Door:
    """What a server needs to let clients in that have the secret."""

    def __init__(self, secret: Secret) -> None:
        """UsageError if no certificate can be had."""
        self._secret = secret
        self._tls = server_tls()

    def link(
        self, pump: LinkOwner[ClientT], sock: Socket, client: ClientT, *, is_here: bool
    ) -> Link[ClientT]:
        """The link of a client that comes to this door; `is_here`: from this machine."""
        return GuardedLink(pump, sock, client, self, is_here=is_here)

    def channel(self) -> Channel:
        return server_channel(self._tls, self._secret)


class GuardedLink(Link[ClientT]):
    """A client that has not said yet how it speaks, or speaks TLS."""

    __slots__ = ("_channel", "_door", "_is_broken", "_is_here")

    def __init__(
        self, pump: LinkOwner[ClientT], sock: Socket, client: ClientT, door: Door, *, is_here: bool
    ) -> None:
        super().__init__(pump, sock, client)
        self._door = door
        self._is_here = is_here
        self._channel: Channel | None = None
        self._is_broken = False  # nothing more can be said under TLS

    def move(self, pump: LinkOwner[ClientT], client: ClientT) -> None:
        if self._channel is not None and self._channel.right is not Right.ALL:
            client.only_look()
        super().move(pump, client)

    def on_readable(self, data: bytes | None = None) -> None:
        """As a plain link does, with TLS below."""
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
        """What the client says to the core; None if there is nothing by now."""
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
            self._channel = self._door.channel()
        channel, was_open = self._channel, self._channel.is_open
        try:
            said = channel.receive(data)
        except AccessError:
            self._is_broken = True
            raise
        finally:
            if going := channel.take():
                self.send_now(going)
        if self.sock.fileno() < 0:  # that could not be sent
            return None
        if channel.is_open and not was_open:
            self._pump.has_proved(self)
            if channel.right is not Right.ALL:
                self.client.only_look()
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
