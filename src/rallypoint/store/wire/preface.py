"""How both ends of a TLS connection prove that they have the job's secret, before anything else. Pure.

The client sends `GREETING`, a byte for the right that it asks for, and 32 random bytes, its nonce. The server
answers with a nonce and its proof. The client answers with a byte 1 and its proof, or with a byte 0 if the
server's proof is wrong. The server then sends a byte 1, and the stream goes on with VALIDATE.

A proof is an HMAC-SHA256 over its side, the right, both nonces and the hash of the server's certificate. So a
proof is good for one connection only, and for the one whose certificate the client has seen: somebody in the
middle would need another certificate, and has no proof for it. The server proves first, so a client tells
nothing to a server that cannot.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from enum import Enum
from typing import Final

from rallypoint.errors import AccessError

GREETING: Final = b"rallypoint 1\n"
NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = hashlib.sha256().digest_size
_GOOD: Final = b"\x01"
_WRONG: Final = b"\x00"
_NO_PROOF: Final = "it does not prove that it has this job's secret"


class Right(Enum):
    """What a client may do."""

    ALL = b"a"
    LOOK = b"l"
    """Ask who is here, and nothing else."""


def key_for(right: Right, secret: bytes) -> bytes:
    """The key that clients with this right have, derived from the secret. It does not lead back to that."""
    return hmac.digest(secret, b"rallypoint key for " + right.value, "sha256")


class ClientPreface:
    """The client's half. `is_done` says that both ends have proved what they had to."""

    def __init__(self, right: Right, key: bytes, certificate: bytes, nonce: bytes) -> None:
        """`key` is that of the right; `certificate`: the hash of the one that the server has shown."""
        self._right, self._key = right, key
        self._certificate, self._nonce = certificate, nonce
        self._kept = b""
        self._has_proved = False
        self.is_done = False

    def begin(self) -> bytes:
        """What to send first."""
        return GREETING + self._right.value + self._nonce

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """Take what the server sends; return what to send it, and what is behind the preface.

        AccessError if the server has not the same secret: `replies` is to be sent before the end.
        """
        self._kept += data
        answer = b""
        if not self._has_proved:
            if len(self._kept) < NONCE_BYTES + _PROOF_BYTES:
                return b"", b""
            nonce, proof, self._kept = _cut(self._kept, NONCE_BYTES, NONCE_BYTES + _PROOF_BYTES)
            facts = self._right.value + self._nonce + nonce + self._certificate
            if not hmac.compare_digest(proof, _prove(self._key, b"server", facts)):
                error = AccessError(
                    _NO_PROOF,
                    hint="give both ends the same secret, in RALLYPOINT_SECRET_FILE or RALLYPOINT_SECRET; if "
                    "they have the same, somebody is in between",
                )
                error.replies = _WRONG
                raise error
            answer = _GOOD + _prove(self._key, b"client", facts)
            self._has_proved = True
        if not self._kept:
            return answer, b""
        if self._kept[:1] != _GOOD:
            raise AccessError("it does not answer our proof as a store does")
        self.is_done = True
        return answer, self._kept[1:]


class ServerPreface:
    """The server's half. `right` is what the client may do, as soon as it has proved that it may."""

    def __init__(self, keys: Mapping[Right, bytes], certificate: bytes, nonce: bytes) -> None:
        self._keys = keys
        self._certificate, self._nonce = certificate, nonce
        self._kept = b""
        self._asked: Right | None = None
        self._facts = b""
        self.right: Right | None = None

    @property
    def is_done(self) -> bool:
        return self.right is not None

    def begin(self) -> bytes:
        """What to send first: nothing."""
        return b""

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """Take what the client sends; return what to send it, and what is behind the preface.

        AccessError if the client does not prove that it has the secret.
        """
        self._kept += data
        if self._asked is None:
            if not GREETING.startswith(self._kept[: len(GREETING)]):
                raise AccessError("it speaks TLS, but does not begin as clients of this version do")
            begin = len(GREETING) + 1
            if len(self._kept) < begin + NONCE_BYTES:
                return b"", b""
            hello, nonce, self._kept = _cut(self._kept, begin, begin + NONCE_BYTES)
            try:
                self._asked = Right(hello[-1:])
            except ValueError:
                raise AccessError(f"it asks for a right that there is not: {hello[-1]}") from None
            self._facts = self._asked.value + nonce + self._nonce + self._certificate
            if self._kept:  # no proof can be right that was sent before our nonce was known
                raise AccessError(_NO_PROOF)
            return self._nonce + _prove(self._keys[self._asked], b"server", self._facts), b""
        if not _GOOD.startswith(self._kept[:1]):
            raise AccessError(
                "it takes our proof for wrong: it has another secret, or somebody is in between"
            )
        if len(self._kept) < len(_GOOD) + _PROOF_BYTES:
            return b"", b""
        _, proof, rest = _cut(self._kept, len(_GOOD), len(_GOOD) + _PROOF_BYTES)
        if not hmac.compare_digest(proof, _prove(self._keys[self._asked], b"client", self._facts)):
            raise AccessError(_NO_PROOF)
        self.right = self._asked
        return _GOOD, rest


def _prove(key: bytes, side: bytes, facts: bytes) -> bytes:
    return hmac.digest(key, b"rallypoint proof of the " + side + b"\n" + facts, "sha256")


def _cut(data: bytes, first: int, second: int) -> tuple[bytes, bytes, bytes]:
    return data[:first], data[first:second], data[second:]
