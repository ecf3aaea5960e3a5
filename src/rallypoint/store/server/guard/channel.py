"""One end of a connection under TLS, with the preface: bytes in, bytes out, and no socket."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from typing import Final

from rallypoint.errors import AccessError
from rallypoint.store.server.guard.certificate import ServerTls, client_context, hash_of
from rallypoint.store.server.guard.secret import Secret, Token
from rallypoint.store.wire.preface import NONCE_BYTES, ClientPreface, Right, ServerPreface

_RECORD_BYTES: Final = 1 << 14

Preface = ClientPreface | ServerPreface


class Channel:
    """Takes the bytes that come, gives those to send. Behind an error it is of no use any more."""

    def __init__(
        self, context: ssl.SSLContext, preface: Callable[[bytes], Preface], name: str | None = None
    ) -> None:
        """`preface` makes the preface from the hash of the certificate that the other end shows, if any.

        `name`: for a client, the host name that it has connected to.
        """
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = name is None
        self._tls = context.wrap_bio(
            self._coming, self._going, server_side=is_server, server_hostname=None if is_server else name
        )
        self._make_preface = preface
        self._preface: Preface | None = None
        self.right: Right | None = None
        """For a server: what the client may do, once that is proved."""
        self.has_ended = False
        """Whether the other end has said that it sends nothing more."""

    @property
    def is_open(self) -> bool:
        """Whether both ends have proved what they had to."""
        return self._preface is not None and self._preface.is_done

    def begin(self) -> bytes:
        """For a client: what to send first."""
        self.receive(b"")
        return self.take()

    def receive(self, data: bytes) -> bytes:
        """Take what has come, and return what it holds for the caller. What `take` gives is to be sent next.

        AccessError if the other end fails to prove something, or breaks TLS.
        """
        self._coming.write(data)
        try:
            if self._preface is None and not self._shake_hands():
                return b""
            said = self._read()
            preface = self._preface
            if preface is None or preface.is_done or not said:
                return said
            try:
                answer, rest = preface.receive(said)
            except AccessError as error:
                self._write(error.replies)
                error.replies = b""
                raise
            self._write(answer)
            if isinstance(preface, ServerPreface):
                self.right = preface.right
        except ssl.SSLCertVerificationError as error:
            raise AccessError(
                f"its certificate is refused: {error.verify_message}",
                hint="RALLYPOINT_TLS_CA has to name who has signed it, and it has to be valid and to name "
                "this host",
            ) from error
        except ssl.SSLError as error:
            raise AccessError(_words_for(error)) from error
        return rest

    def seal(self, data: bytes) -> bytes:
        """What to send, for what is to be said."""
        self._write(data)
        return self.take()

    def take(self) -> bytes:
        """What is to be sent by now."""
        return self._going.read()

    def _shake_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        shown = self._tls.getpeercert(binary_form=True)
        self._preface = self._make_preface(hash_of(shown) if shown else b"")
        self._write(self._preface.begin())
        return True

    def _read(self) -> bytes:
        pieces = []
        try:
            while piece := self._tls.read(_RECORD_BYTES):
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.has_ended = True
        return b"".join(pieces)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]


def server_channel(tls: ServerTls, secret: Secret) -> Channel:
    keys = secret.keys
    return Channel(tls.context, lambda _: ServerPreface(keys, tls.certificate, os.urandom(NONCE_BYTES)))


def client_channel(host: str, secret: Secret | Token) -> Channel:
    """For a client that has connected to `host`."""

    def preface(certificate: bytes) -> ClientPreface:
        return ClientPreface(*secret.proof, certificate, os.urandom(NONCE_BYTES))

    return Channel(client_context(), preface, host.strip("[]"))


def _words_for(error: ssl.SSLError) -> str:
    reason = (error.reason or "unknown error").replace("_", " ").lower()
    if reason.endswith("alert access denied"):
        return "it takes no TLS: it has no secret, or RALLYPOINT_INSECURE is set for this process alone"
    if reason in ("wrong version number", "record layer failure"):
        return "it speaks no TLS: it is no store of Rallypoint's, or has no secret"
    return f"TLS failed: {reason}"
